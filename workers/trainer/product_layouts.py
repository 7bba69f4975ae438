"""The matrix products of a model's linear layers, and in which layout of memory each is fastest.

A library's kernels differ by whether a factor lies row by row ("N") or column by column ("T"):
AxoNN's authors saw one product of a 320B model run eight times faster as NN than as TN on MI250X
(arXiv:2502.08145). A factor that lies otherwise is copied first, which the timings include.

The layouts are measured by `layout-tuner calibrate --model`, and rank 0 tells them to the other
ranks: ranks that decided alone would sum in different orders. Needs no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from layout_tuner.search_spaces.layouts.layout import Precision
from layout_tuner.search_spaces.models.model_shape import ModelShape

Kind = Literal["output", "input_gradient", "weight_gradient"]

OWN_LAYOUTS: Final[Mapping[Kind, str]] = {
    "output": "NT",
    "input_gradient": "NN",
    "weight_gradient": "TN",
}
"""How the factors lie without a copy: x W^T, dy W and dy^T x of matrices that lie row by row."""

LAYOUTS: Final = ("NN", "NT", "TN")

_LEAST_GAIN: Final = 0.05
"""Share of the time that another layout must save; less is within the noise of the timings."""

_MICRO_BATCH_SIZES: Final = (1, 2, 4)


class Product(NamedTuple):
    """A product of (rows, inner) and (inner, columns)."""

    kind: Kind
    precision: Precision
    rows: int
    columns: int
    inner: int


def products_of(
    model: ModelShape, *, devices_per_node: int, precision: Precision
) -> Iterator[Product]:
    """The products of its dense layers and its head, by tp within a node and micro-batch size.

    Products of experts are left out: they run in groups, by kernels of their own.
    """
    found: dict[Product, None] = {}
    for tp in (size for size in range(1, devices_per_node + 1) if devices_per_node % size == 0):
        for micro_batch_size in _MICRO_BATCH_SIZES:
            tokens = model.seq_length * micro_batch_size
            for outputs, inputs in _weights(model, tp):
                shapes = {
                    "output": (tokens, outputs, inputs),
                    "input_gradient": (tokens, inputs, outputs),
                    "weight_gradient": (outputs, inputs, tokens),
                }
                for kind in OWN_LAYOUTS:
                    found[Product(kind, precision, *shapes[kind])] = None
    yield from found


def _weights(model: ModelShape, tp: int) -> Iterator[tuple[int, int]]:
    """Output and input features of a rank's weights; none where tp does not divide the model."""
    sizes = model.num_heads, model.num_kv_heads, model.ffn_hidden_size, model.vocab_size
    if any(size % tp for size in sizes):
        return
    hidden, ups = model.hidden_size, model.num_ups
    for each in (kind.shape for kind in model.kinds):
        matrices = each.mixer_parts.matrices
        if whole := [matrix for matrix in matrices if matrix.split == "whole"]:
            yield sum(matrix.columns for matrix in whole), hidden  # one product
        for matrix in (matrix for matrix in matrices if matrix.split != "whole"):
            rows = matrix.rows // (tp if matrix.split == "rows" else 1)
            yield matrix.columns // (tp if matrix.split == "columns" else 1), rows
        if each.feed_forward == "dense":
            yield ups * model.ffn_hidden_size // tp, hidden
            yield hidden, model.ffn_hidden_size // tp
    yield model.vocab_size // tp, hidden


def products_in(timings: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The timings of products in one layout each."""
    return [timing for timing in timings if timing["operation"] == "product"]


def fastest_layouts(timings: Iterable[Mapping[str, Any]]) -> dict[Product, str]:
    """The products that another layout than their own makes faster, and that layout."""
    seconds: dict[Product, dict[str, float]] = defaultdict(dict)
    for timing in products_in(timings):
        product = Product(*(timing[name] for name in Product._fields))
        seconds[product][timing["layout"]] = timing["seconds"]
    fastest = {}
    for product, by_layout in seconds.items():
        best = min(by_layout, key=by_layout.__getitem__)
        own_s = by_layout[OWN_LAYOUTS[product.kind]]
        if by_layout[best] < (1 - _LEAST_GAIN) * own_s:
            fastest[product] = best
    return fastest


def to_rows(layouts: Mapping[Product, str]) -> list[list[Any]]:
    """The layouts as plain JSON values."""
    return [[*product, layout] for product, layout in layouts.items()]


def from_rows(rows: Sequence[Sequence[Any]]) -> dict[Product, str]:
    """Reads them back."""
    return {Product(*product): layout for *product, layout in rows}

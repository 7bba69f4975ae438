"""Parameters: slices of logical parameters, with gradients that accumulate in the flat buffer.

A fused weight (query, key and value; gate and up) consists of several logical parameters. Each is
named, seeded and sliced on its own, so that every layout holds slices of the same logical model.

Shapes: T tokens of a micro-batch, O and I local output and input features, H hidden; E experts, M
rows of tokens that are sorted by expert.
"""

# ruff: noqa: N803, N806, N812 (tensors carry their shape in the name)

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Concatenate, Final, Literal, NamedTuple, ParamSpec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from layout_tuner.workers.trainer.model.matrix_products import (
    add_product,
    multiplies_in_fp32,
    weight_gradient,
)

_BLOCK_ELEMENTS: Final = 1 << 16
"""Elements that one seed initialises. A rank draws only the blocks that overlap its slice."""

_CONVERTED_ELEMENTS: Final = 1 << 16
"""Elements of a gradient converted to fp32 at once: a quarter of a core's cache or less."""

_FEW_ROWS: Final = 64
"""Rows of an expert up to which its 16-bit product is computed in fp32: adding a 16-bit product to
the fp32 gradient costs as much as about so many rows save where 16-bit products are fast. That is
an estimate from the speeds of products with AMX and of sums without."""


class Cut(NamedTuple):
    """Which of how many slices of a parameter a rank holds: over tp, or of experts over etp."""

    place: int
    parts: int
    column: int = 0
    """The same over tensor columns."""
    columns: int = 1


WHOLE: Final = Cut(0, 1)
"""One rank holds the whole parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterPart:
    """A logical parameter, and how tensor parallelism divides it."""

    name: str
    """Canonical name, the same under every layout."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    shard_dim: int | None
    """Dim that is divided over tp, of experts over etp; None: each holds the whole parameter."""
    init: Literal["normal", "zeros", "ones"]
    column_dim: int | None = None
    """Dim that is divided over tensor columns, after tp where it is the same; None: each holds all
    of it."""
    std: float = 0.02
    """Standard deviation, if init is "normal"."""
    partial_gradient: bool = False
    """Whether each tp rank has a part of the gradient of a parameter that it holds whole."""

    def local_shape(self, cut: Cut) -> tuple[int, ...]:
        """Shape of a slice."""
        return tuple(size // self._slice(dim, cut)[1] for dim, size in enumerate(self.shape))

    def offsets(self, cut: Cut) -> tuple[int, ...]:
        """First index of a slice in each dim of the whole parameter."""
        shape = self.local_shape(cut)
        return tuple(self._slice(dim, cut)[0] * size for dim, size in enumerate(shape))

    def _slice(self, dim: int, cut: Cut) -> tuple[int, int]:
        """Place and number of the slices of one dim."""
        place, parts = (cut.place, cut.parts) if dim == self.shard_dim else (0, 1)
        if dim == self.column_dim:
            return place * cut.columns + cut.column, parts * cut.columns
        return place, parts

    def is_first_copy(self, cut: Cut) -> bool:
        """Whether a slice is the first of equal ones, over the axes that do not divide it."""
        over_tp = self.shard_dim is not None or cut.place == 0
        return over_tp and (self.column_dim is not None or cut.column == 0)


_Factors = ParamSpec("_Factors")


def _can_wait(
    add: Callable[Concatenate[ModelParameter, _Factors], None],
) -> Callable[Concatenate[ModelParameter, _Factors], None]:
    """Lets a gradient wait where the parameter says so (`ModelParameter.put_off`)."""

    def now_or_later(
        self: ModelParameter, /, *factors: _Factors.args, **named: _Factors.kwargs
    ) -> None:
        if self.put_off is None:
            add(self, *factors, **named)
        else:
            self.put_off.append(partial(add, self, *factors, **named))

    return update_wrapper(now_or_later, add)


class ModelParameter(nn.Parameter):
    """A weight whose gradients are added to `main_grad`, a view of the flat fp32 buffer.

    It is declared on the meta device. `parallel.flat_buffers.FlatBuffers` replaces it with one that
    has memory.
    """

    parts: tuple[ParameterPart, ...]
    cut: Cut
    of_experts: bool
    """Whether it belongs to experts, so that other ranks hold the same than of other parameters."""
    main_grad: Tensor
    counted: bool
    """Whether this copy counts in the norm of the gradient, and is written to checkpoints: ranks of
    tp and of tensor columns may hold the same, and a tied embedding has two copies."""
    main_grad_is_stale: bool = False
    """Whether `main_grad` holds the previous step's gradient. The next gradient then overwrites it,
    which saves the pass that would clear it."""
    gradients_left: int = 0
    """Gradients of this step that are still to be added."""
    put_off: list[Callable[[], None]] | None = None
    """Where gradients wait until the pipeline runs their products; None: they are added at once."""
    when_first: Callable[[], None] | None = None
    """Called before a gradient overwrites `main_grad`, which it may set."""
    when_final: Callable[[], None] | None = None
    """Called when the last gradient of a step has been added."""

    @property
    def replicated(self) -> bool:
        """Whether every tp rank holds the whole parameter.

        Each computes the same gradient; under sequence parallelism, the part from its own tokens.
        """
        return self.parts[0].shard_dim is None

    @_can_wait
    def add_gradient(self, gradient: Tensor) -> None:
        """Adds a gradient of any precision to `main_grad`."""
        self._add_now(gradient)

    def _add_now(self, gradient: Tensor) -> None:
        self._begin_gradient()
        self._add(self.main_grad, gradient)
        self._count_gradient()

    def _add(self, sum_: Tensor, gradient: Tensor) -> None:
        if self.main_grad_is_stale:
            sum_.copy_(gradient)
        elif gradient.dtype == sum_.dtype or gradient.is_cuda:
            sum_.add_(gradient)
        else:
            # On the CPU torch first converts the whole operand; a few rows at once stay in cache.
            rows = max(_CONVERTED_ELEMENTS // gradient[0].numel(), 1)
            torch._foreach_add_(torch.split(sum_, rows), torch.split(gradient, rows))

    @_can_wait
    def add_product(self, left_OT: Tensor, right_TI: Tensor) -> None:
        """Adds a matrix product to `main_grad`; without a temporary if it is computed in fp32."""
        if left_OT.dtype != torch.float32 and not multiplies_in_fp32(left_OT):
            self._add_now(weight_gradient(left_OT, right_TI))
            return
        self._begin_gradient()
        add_product(self.main_grad, left_OT, right_TI, beta=0 if self.main_grad_is_stale else 1)
        self._count_gradient()

    @_can_wait
    def add_products(self, left_MO: Tensor, right_MI: Tensor, ends_E: Tensor) -> None:
        """Adds the product of each expert's rows to its O rows of `main_grad`, (E O, I).

        On a CPU one expert after the other: the temporary, if there is one, stays in the cache.
        """
        if left_MO.is_cuda:
            products_EOI = F.grouped_mm(left_MO.t(), right_MI, offs=ends_E)
            self._add_now(products_EOI.flatten(0, 1))
            return
        self._begin_gradient()
        ends = ends_E.tolist()
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        sums = self.main_grad.view(len(ends), -1, self.main_grad.shape[-1])
        for sum_OI, left_TO, right_TI in zip(
            sums, torch.split(left_MO, sizes), torch.split(right_MI, sizes), strict=True
        ):
            is_fp32 = left_TO.dtype == torch.float32 or multiplies_in_fp32(left_TO)
            if is_fp32 or len(left_TO) <= _FEW_ROWS:
                beta = 0 if self.main_grad_is_stale else 1
                add_product(sum_OI, left_TO.t(), right_TI, beta=beta)
            else:
                self._add(sum_OI, left_TO.t() @ right_TI)
        self._count_gradient()

    @_can_wait
    def add_rows(self, rows_T: Tensor, gradient_TH: Tensor) -> None:
        """Adds row t of a gradient to row rows_T[t] of `main_grad`."""
        self._begin_gradient()
        if self.main_grad_is_stale:
            self.main_grad.zero_()
        self.main_grad.index_add_(0, rows_T, gradient_TH)
        self._count_gradient()

    def _begin_gradient(self) -> None:
        if self.main_grad_is_stale and self.when_first is not None:
            self.when_first()

    def _count_gradient(self) -> None:
        self.main_grad_is_stale = False
        self.gradients_left -= 1
        if self.gradients_left == 0 and self.when_final is not None:
            self.when_final()


def declare(
    *parts: ParameterPart, cut: Cut, counted: bool = True, of_experts: bool = False
) -> ModelParameter:
    """Declares a rank's slice of one logical parameter, or of several stacked along dim 0."""
    shapes = [part.local_shape(cut) for part in parts]
    shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    parameter = ModelParameter(torch.empty(shape, device="meta"))
    parameter.parts, parameter.cut = parts, cut
    parameter.counted = counted and parts[0].is_first_copy(cut)
    parameter.of_experts = of_experts
    return parameter


def local_parts(parameter: ModelParameter, value: Tensor) -> Iterator[tuple[ParameterPart, Tensor]]:
    """The logical parameters' slices of a (fused) value of the parameter's shape, as views."""
    start = 0
    for part in parameter.parts:
        rows = part.local_shape(parameter.cut)[0]
        yield part, value[start : start + rows]
        start += rows


def initialise(value: Tensor, part: ParameterPart, *, seed: int, cut: Cut = WHOLE) -> None:
    """Initialises a slice of a logical parameter, with the same numbers in every layout."""
    if part.init != "normal":
        value.fill_(1.0 if part.init == "ones" else 0.0)
        return
    row_elements = max(torch.Size(part.shape[1:]).numel(), 1)
    block_rows = max(_BLOCK_ELEMENTS // row_elements, 1)
    first_row, *others = part.offsets(cut)
    last_row = first_row + value.shape[0]
    columns = slice(None)
    if others:
        columns = slice(others[0], others[0] + value.shape[1])
    generator = torch.Generator(device=value.device)
    for block in range(first_row // block_rows, -(-last_row // block_rows)):
        start, end = block * block_rows, min((block + 1) * block_rows, part.shape[0])
        digest = hashlib.blake2b(f"{seed}/{part.name}/{block}".encode(), digest_size=7).digest()
        generator.manual_seed(int.from_bytes(digest, "big"))
        drawn = torch.empty((end - start, *part.shape[1:]), device=value.device)
        drawn.normal_(0.0, part.std, generator=generator)
        rows = drawn[max(first_row - start, 0) : last_row - start]
        at = max(start - first_row, 0)
        value[at : at + rows.shape[0]].copy_(rows[:, columns] if rows.dim() > 1 else rows)

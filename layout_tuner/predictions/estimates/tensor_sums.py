"""The sums of tensor parallelism: elements by axis, and their seconds in a step.

`layer_sums` is the one definition of the elements; the trainer is tested against it. A sum that
runs beside the product of a weight gradient costs less than one that is waited for: the factors
were chosen on trainers whose column-parallel layers overlap so, and `_no_longer_hidden` adds what a
layout has lost of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.predictions.estimates.links import GroupLinks
from layout_tuner.predictions.estimates.step_shape import (
    StepShape,
    mean_of_kinds,
    mean_of_layers,
)
from layout_tuner.search_spaces.models.model_shape import ModelShape

COLLECTIVE_S: Final = 4e-5
"""Latency of any collective before its first step: about 10 us in NCCL's own model (`baseLat`); the
rest is for ranks that do not arrive at the same time."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Elements of a token that a rank sums over one axis, forward and backward."""

    forward: Any
    backward: Any


@dataclass(frozen=True, slots=True)
class LayerSums:
    """What a layer sums; experts apart."""

    tp: Sums
    columns: Sums
    norms: Sums
    """Over columns too: the statistics of norms, of tokens that the rank holds between layers."""


def layer_sums(model: ModelShape, tp: Any = 1, columns: Any = 1) -> LayerSums:
    """Elements of a token that the matrices and norms of a dense layer sum (arXiv:2502.08145).

    Over tp, of the residual stream (H / c): forward the outputs of two row-parallel matrices,
    backward the input gradients of two column-parallel ones; a parallel block sums one of each.
    Over columns it is the other way round: forward the outputs of query, key and value and of the
    feed-forward's first matrices, backward the input gradients of the other two (both / r). A
    LayerNorm sums two numbers a pass, an RMSNorm one.
    """
    count = 1.0 if model.parallel_block else model.num_sublayers
    over_tp = (count - latent_saving(model)) * model.hidden_size / columns
    first, second = _split_widths(model, model.ffn_hidden_size)
    norms = norm_sums(model) * model.num_layer_norms
    return LayerSums(Sums(over_tp, over_tp), Sums(first / tp, second / tp), Sums(norms, norms))


def latent_saving(model: ModelShape) -> float:
    """Share of a sum over tp that latent attention saves: half of one gathers latents instead."""
    gathered = model.mixer_parts.gathered or model.hidden_size
    return (model.hidden_size - gathered) / (2.0 * model.hidden_size)


def _split_widths(model: ModelShape, inner: int) -> tuple[float, float]:
    """Outputs of a layer's matrices that are divided by columns, and inputs of those by rows."""
    matrices = model.mixer_parts.matrices
    first = sum(each.columns for each in matrices if each.split == "columns")
    second = sum(each.rows for each in matrices if each.split == "rows")
    return float(first + model.num_ups * inner), float(second + inner)


def norm_sums(model: ModelShape) -> float:
    """Numbers that one norm sums for a token, forward and as many backward."""
    return 2.0 if model.has_layer_norms else 1.0


def tensor_terms(step: StepShape) -> Iterator[tuple[str, Floats]]:
    """Tensor parallelism: two all-reduces per block and pass; sequence parallelism moves as much.

    Megatron-LM (arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2.2): forward two,
    backward two, and two more with full recomputation. A ring of t ranks takes 2 (t - 1) steps of
    1/t of the bytes each (Patarasuk and Yuan 2009). Experts gather and scatter their tokens over
    etp instead. Tensor columns divide what tp sums, and sum what tp divides (`layer_sums`).
    """
    columns, count = step.tp_columns, tp_collectives(step)
    # The gradient of the head's input has whole features.
    over_tp = count + np.where(step.tp > 1, (columns - 1.0) * step.slots / step.pp, 0.0)
    if saving := mean_of_kinds(step.model, latent_saving):
        saved = saving * (1.0 + step.forward_passes) * step.layer_slots
        over_tp = over_tp - np.where(step.tp > 1, saved, 0.0)
    groups = [(step.tp, over_tp, step.tokens / columns, count, step.links.tensor)]
    if (columns > 1).any():
        count, sums = column_collectives(step), np.ones(columns.shape)
        tokens = _column_bytes(step) / step.element_bytes / step.model.hidden_size
        groups.append((columns, sums, tokens, count, step.links.tensor_columns))
    if step.model.num_experts and (step.etp > 1).any():
        count = np.where(step.etp > 1, (1.0 + step.forward_passes) * step.expert_slots, 0.0)
        groups.append((step.etp, count, step.expert_tokens, count, step.links.expert_tensor))
    names = ("tensor_inside", "tensor_across", "latency_inside", "latency_across")
    seconds: dict[str, Floats] = {name: np.zeros(step.tp.shape) for name in names}
    for n, sums, tokens, count, links in groups:
        latency_s = COLLECTIVE_S + 2.0 * (n - 1.0) * links.mean_latency_s(step.cluster)
        one = 2.0 * (n - 1.0) / n * step.element_bytes * tokens * step.model.hidden_size
        parts = [("tensor", sums * one / links.bytes_per_s), ("latency", count * latency_s)]
        if links is step.links.tensor and not step.model.num_experts:
            exposed = np.where(step.token_share < 1.0, step.kernels.exposed_sums, 1.0)
            parts = [(name, exposed * term) for name, term in parts]
        if links is not step.links.expert_tensor:
            parts += [("tensor", lost) for lost in _no_longer_hidden(step, n, links)]
        for name, term in parts:
            seconds[f"{name}_inside"] += np.where(links.inside, term, 0.0)
            seconds[f"{name}_across"] += np.where(links.inside, 0.0, term)
    yield from seconds.items()


def tp_collectives(step: StepShape) -> Floats:
    """All-reduces over tp of a step on the slowest path: of blocks, embedding and output.

    Attention has one a pass, and so has a feed-forward that is not routed experts.
    """
    model = step.model
    routed = 0.0 if model.shared_expert_ffn_hidden_size else step.expert_slots
    each = mean_of_kinds(model, lambda of: 1.0 if of.parallel_block else of.num_sublayers)
    without = mean_of_kinds(model, lambda of: of.feed_forward is None)
    blocks = each * (1.0 + step.forward_passes) * step.layer_slots
    dense = step.layer_slots - step.expert_slots - without * step.layer_slots
    blocks = blocks + step.recomputes["mlp"] * dense
    count = blocks - (1.0 + step.forward_passes) * routed + 2.0 * step.slots / step.pp
    return np.where(step.tp > 1, count, 0.0)


def column_collectives(step: StepShape) -> Floats:
    """Collectives over tensor columns of a step on the slowest path.

    A block has two sums of products a pass, and two of norms. Embedding and head each scatter and
    gather features, and the last norm has a sum a pass.
    """
    blocks = 4.0 * (1.0 + step.forward_passes) * step.layer_slots
    return np.where(step.tp_columns > 1, blocks + 6.0 * step.slots / step.pp, 0.0)


def _column_bytes(step: StepShape) -> Floats:
    """Bytes that are summed over tensor columns in a step on the slowest path.

    A gather or scatter is half a sum; the head's is of the tokens that a rank holds there.
    """
    model, passes = step.model, step.forward_passes
    sums = layer_sums(model, step.tp)
    a_layer = step.element_bytes * (passes * sums.columns.forward + sums.columns.backward)
    a_layer = a_layer + sums.norms.forward * step.token_share * _norm_bytes(model, passes)
    ends = step.element_bytes * model.hidden_size * (1.0 + step.token_share)
    ends = ends + norm_sums(model) * step.token_share * _norm_bytes(model, 1.0)
    total = step.tokens * (a_layer * step.layer_slots + ends * step.slots / step.pp)
    return np.asarray(total, dtype=np.float64)


def _norm_bytes(model: ModelShape, passes: Floats | float) -> Floats | float:
    """Bytes of a number that a norm sums, of its passes forward and the one backward.

    They are fp32; forward sums of a LayerNorm are fp64, since squares of a large mean cancel.
    """
    return passes * (8.0 if model.has_layer_norms else 4.0) + 4.0


def _no_longer_hidden(step: StepShape, n: Floats, links: GroupLinks) -> Iterator[Floats]:
    """Seconds of sums over tp or columns that no weight gradient hides any more.

    They are the input gradients' sums, at most as long as the products beside which others run
    them: over tp of column-parallel matrices, over columns of row-parallel ones. With zero bubbles
    the products wait. With sequence parallelism a row-parallel matrix multiplies after it has
    gathered, and waits for its sum over columns; over tp a scatter, half a sum, runs beside.
    """
    is_tp = links is step.links.tensor
    waits = step.puts_off_gradients | ((not is_tp) & (step.token_share < 1.0))
    waits = waits & (n > 1.0)
    if not waits.any():
        return
    sent = mean_of_layers(step.model, partial(_summed_gradients, step, is_tp=is_tp))
    product_s = mean_of_layers(step.model, partial(_weight_product_s, step, is_tp=is_tp))
    half = np.where(is_tp & (step.token_share < 1.0), 0.5, 1.0)
    sum_s = 2.0 * (n - 1.0) / n * half * step.element_bytes * step.tokens * sent / links.bytes_per_s
    yield np.where(waits, step.layer_slots * np.minimum(sum_s, product_s), 0.0)


def _summed_gradients(step: StepShape, model: ModelShape, *, is_tp: bool) -> Floats:
    """Elements of a token whose gradients a layer sums over tp or columns."""
    sums = layer_sums(model, step.tp, step.tp_columns)
    routed = model.num_experts and not model.shared_expert_ffn_hidden_size
    whole = sums.tp.backward / (2.0 if routed else 1.0) if is_tp else sums.columns.backward
    return np.asarray(whole, dtype=np.float64)


def _weight_product_s(step: StepShape, model: ModelShape, *, is_tp: bool) -> Floats:
    """Seconds of the products of weight gradients of the matrices that sum so."""
    f = model.shared_expert_ffn_hidden_size if model.num_experts else model.ffn_hidden_size
    first, second = _split_widths(model, f)
    width = first if is_tp else second
    flops = 2.0 * step.tokens * model.hidden_size * width / step.tp_ranks
    return np.asarray(flops / step.peak_flops_per_s, dtype=np.float64)

"""The matrix products of a layer on a rank, and their seconds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from layout_tuner.array_types import Bools, Floats, Ints
from layout_tuner.predictions.estimates.distinct_rows import different
from layout_tuner.predictions.estimates.products import ProductRates, product_rates
from layout_tuner.predictions.estimates.step_shape import StepShape, mean_of_layers
from layout_tuner.search_spaces.layouts.layout import PRECISIONS
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.models.sublayers import Matrix, dense_width

_HALF_SPEED: Final = 100.0
"""Inner dimension at which a matrix product takes twice the time of its operations: each tile of
the result starts and drains a loop over it."""


def matrix_seconds(step: StepShape) -> tuple[Floats, Bools]:
    """Seconds of a layer's products for a micro-batch, and where they are at measured rates."""
    model = step.model
    operations = mean_of_layers(model, partial(_matrix_operations, step))
    seconds, is_measured = operations / step.peak_flops_per_s, np.zeros(step.tp.shape, dtype=bool)
    for here, rates in rates_of(step, step.precision):
        at_rates = mean_of_layers(model, partial(_seconds_at_rates, step, rates))
        seconds, is_measured = np.where(here, at_rates, seconds), is_measured | here
    return seconds, is_measured


def rates_of(step: StepShape, precision: Ints) -> Iterator[tuple[Bools, ProductRates]]:
    """The rates of measured products, each with the layouts that have them."""
    if step.kernels.uses_measured_rates:
        for code in different(precision):
            if (rates := product_rates(step.cluster, PRECISIONS[code])) is not None:
                yield precision == code, rates


class LayerProduct(NamedTuple):
    """Forward products of a block that are alike: out[rows, columns] = in[rows, inner] w."""

    number: Floats | float
    rows: Floats
    inner: Floats | float
    columns: Floats | float
    forward: Floats
    """Times that they are multiplied."""
    is_grouped: bool
    """Whether they are those of routed experts."""


def products_of(step: StepShape, model: ModelShape) -> Iterator[LayerProduct]:
    """The products of a block.

    Recomputation by operator multiplies key, attention's output and up again, and keeps the others;
    of routed experts, whose grouped products are one operator each, it repeats all. That of `mlp`
    repeats both products of a dense feed-forward.
    """
    wide = dense_width(model)
    mixer = model.num_attention_matrix_parameters / model.hidden_size
    again = (mixer / 2.0 + wide) / max(mixer + (model.num_ups + 1.0) * wide, 1.0)
    forward = step.forward_passes + again * step.repeats_operators
    for each in model.mixer_parts.matrices:
        is_up = each.split == "columns" and model.kv_lora_rank > 0
        times = forward + step.recomputes["mla_up_proj"] if is_up else forward
        yield _matrix_product(step, each, times)
    for count, rows, f, ranks, is_grouped in _feed_forwards(step, model):
        times = step.forward_passes + step.repeats_operators if is_grouped else forward
        times = times if model.num_experts else times + step.recomputes["mlp"]
        h = (model.routed_width if is_grouped else model.hidden_size) / step.tp_columns
        yield LayerProduct(count, rows, h, model.num_ups * f / ranks, times, is_grouped)
        yield LayerProduct(count, rows, f / ranks, h, times, is_grouped)
    if latent := model.expert_latent_size:
        for ends in ((model.hidden_size, latent), (latent, model.hidden_size)):
            yield _matrix_product(step, Matrix(*ends, "whole"), forward)


def _matrix_product(step: StepShape, of: Matrix, forward: Floats) -> LayerProduct:
    """The product of a mixer's matrix; a whole one takes the tokens that a rank holds."""
    if of.split == "columns":
        inner, columns = of.rows / step.tp_columns, of.columns / step.tp
    elif of.split == "rows":
        inner, columns = of.rows / step.tp, of.columns / step.tp_columns
    else:
        held = step.tokens * step.token_share
        return LayerProduct(1.0, held, float(of.rows), float(of.columns), forward, False)
    return LayerProduct(1.0, step.tokens, inner, columns, forward, False)


def _matrix_operations(step: StepShape, model: ModelShape) -> Floats:
    """Operations of a block's matrix products for a micro-batch, small inner dimensions weighed up.

    The forward product of [rows, inner] and [inner, columns] is followed by two of the same size:
    the gradient of the input, whose inner dimension is the columns, and that of the weight, whose
    inner dimension is the rows. Each expert has a product of its own, with its share of the rows.
    """
    total = np.zeros(step.tp.shape)
    for count, rows, inner, columns, forward, _ in products_of(step, model):
        passes = 2.0 + forward
        passes = passes + _HALF_SPEED * (forward / inner + 1.0 / columns + 1.0 / rows)
        total += count * (2.0 * rows * inner * columns * passes)
    return total


def _seconds_at_rates(step: StepShape, rates: ProductRates, model: ModelShape) -> Floats:
    """Seconds of the same products at measured rates.

    The experts of a rank count as one product of all their rows, times what grouping costs.
    """
    total = np.zeros(step.tp.shape)
    for count, rows, inner, columns, forward, is_grouped in products_of(step, model):
        slowdown = rates.grouped_slowdown(rows) if is_grouped else 1.0
        total += slowdown * product_seconds(rates, forward, count * rows, inner, columns)
    return total


def product_seconds(
    rates: ProductRates,
    forward: Floats | float,
    rows: Floats,
    inner: Floats | float,
    columns: Floats | float,
) -> Floats:
    """Seconds of a product, so many times, and of the gradients of its input and its weight."""
    m, k, n = (np.asarray(each, dtype=np.float64) for each in (rows, inner, columns))
    gradients_s = rates.seconds(m, k, n) + rates.seconds(k, n, m)
    return np.asarray(forward * rates.seconds(m, n, k) + gradients_s)


def _feed_forwards(
    step: StepShape, model: ModelShape
) -> Iterator[tuple[Floats | float, Floats, float, Floats, bool]]:
    """The feed-forwards of a layer on a rank.

    Yields how many are alike, the tokens of each, their width, the ranks that divide it, and
    whether they are routed experts.
    """
    if not model.num_experts:
        if model.ffn_hidden_size:
            yield 1.0, step.tokens, float(model.ffn_hidden_size), step.tp, False
        return
    experts = model.num_experts / step.ep
    rows = step.expert_tokens * model.experts_per_token / experts
    yield experts, rows, float(model.moe_ffn_hidden_size), step.etp, True
    if model.shared_expert_ffn_hidden_size:
        yield 1.0, step.tokens, float(model.shared_expert_ffn_hidden_size), step.tp, False


def sorted_rows(step: StepShape, model: ModelShape) -> Floats | float:
    """Rows that go through the experts of a rank, for each token that the rank holds."""
    return model.experts_per_token * step.expert_tokens / step.tokens if model.num_experts else 0.0


def rows_and_width(step: StepShape, model: ModelShape) -> tuple[Floats | float, float]:
    """Rows of a token in a rank's feed-forwards of a layer, and the width of all its rows."""
    shared = model.shared_expert_ffn_hidden_size
    if not model.num_experts:
        return 1.0, float(model.ffn_hidden_size)
    width = float(model.experts_per_token * model.moe_ffn_hidden_size + shared)
    return sorted_rows(step, model) + float(shared > 0), width


def matrix_bytes(step: StepShape, model: ModelShape) -> Floats:
    """Bytes that the matrices of a block move in one pass: weights, inputs and outputs.

    This bounds the speed where a rank's matrices are small (roofline, Williams et al. 2009).
    """
    rows, f = rows_and_width(step, model)
    h, ups, matrices = model.hidden_size, model.num_ups, model.mixer_parts.matrices
    rows = rows if model.feed_forward else 0.0
    whole = ((2.0 * h if matrices else 0.0) + rows * 2.0 * h) / step.tp_columns
    inner = sum(each.columns if each.split == "columns" else each.rows for each in matrices)
    shared = inner + ups * f + f
    weights = float(model.num_layer_matrix_parameters - model.num_expert_parameters) / step.tp_ranks
    weights = weights + model.num_expert_parameters / (step.etp * step.ep)
    return step.element_bytes * (weights + step.tokens * (whole + shared / step.tp))

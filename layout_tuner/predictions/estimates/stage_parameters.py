"""Parameters that a rank holds of a pipeline stage."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layout_tuner.array_types import Floats
from layout_tuner.predictions.estimates.rank_stages import StageLayers, layer_shapes
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.models.sublayers import dense_width, num_beside_routed_parameters


def stage_parameters(
    columns: LayoutColumns, model: ModelShape, stage: NDArray[Any], layers: StageLayers
) -> tuple[Floats, Floats, Floats]:
    """Parameters that one rank of the stage holds: outside of experts, experts, those of layers.

    With several stages the last one holds a copy of the embedding, where it is tied or multi-token
    prediction embeds tokens.
    """
    vocabulary, positions, final_norm = _end_parameters(columns, model)
    layer = layers.mean(lambda shape: _layer_parameters(columns, shape))
    of_experts = layers.mean(lambda shape: _expert_parameters(columns, shape))
    first, last = stage == 0, stage == columns.last_rank
    owns_output = last & ((columns.pp > 1) | (not model.tied_embeddings))
    others = (
        layers.number * layer
        + np.where(first, vocabulary + positions, 0.0)
        + np.where(last, final_norm, 0.0)
        + np.where(owns_output, vocabulary, 0.0)
    )
    of_layers_alone = layers.number * (layer + of_experts)
    experts = layers.number * of_experts
    if model.num_mtp_layers:
        of_depths, in_depths = _mtp_parameters(columns, model)
        others = others + np.where(last, of_depths, 0.0)
        experts = experts + np.where(last, in_depths, 0.0)
        of_layers_alone = of_layers_alone + np.where(last, of_depths + in_depths, 0.0)
        others = others + np.where(last & ~first & (not model.tied_embeddings), vocabulary, 0.0)
    return np.asarray(others, dtype=np.float64), experts, of_layers_alone


def _mtp_parameters(columns: LayoutColumns, model: ModelShape) -> tuple[Floats, Floats]:
    """Parameters of a rank of all depths of multi-token prediction: outside of experts, experts.

    Megatron-LM divides the projection by columns (core/transformer/multi_token_prediction.py).
    """
    shapes, depths = model.mtp_shapes, model.num_mtp_layers
    *_, norm = _end_parameters(columns, model)
    others = 2.0 * model.hidden_size**2 / columns.tp_ranks + 3.0 * norm
    others = sum((_layer_parameters(columns, shape) for shape in shapes), start=others)
    experts = sum((_expert_parameters(columns, shape) for shape in shapes), start=np.zeros(()))
    return depths * others, depths * experts


def _layer_parameters(columns: LayoutColumns, model: ModelShape) -> Floats:
    """Parameters of a block that a rank holds outside of experts.

    Matrices and the biases of column-parallel matrices are split over tp. Norms, the biases of
    row-parallel matrices, routers, and what leads into and out of latents are replicated. Tensor
    columns split matrices, norms and the biases of row-parallel ones.
    """
    h, c, mixer = float(model.hidden_size), columns.tp_columns, model.mixer_parts
    rows = model.biases_of in ("attention", "all") and model.has_softmax_attention
    inner_rows = model.biases_of == "all" and dense_width(model) > 0
    rows_biases = h * (rows + inner_rows)
    of_features = model.num_layer_norms * float(model.norm_parameters) + rows_biases
    replicated = float(mixer.whole_parameters + mixer.num_whole_matrix_parameters) - h * rows
    replicated += num_beside_routed_parameters(model)
    shared = model.num_layer_parameters - model.num_expert_parameters - replicated - of_features
    width = model.query_size + 2.0 * model.kv_hidden_size if model.biases_of != "none" else 0.0
    width += model.num_ups * model.ffn_hidden_size if model.biases_of == "all" else 0
    biases = width * (c - 1.0)  # beyond 1 / c of them
    return np.asarray(
        (shared + biases) / columns.tp_ranks + (replicated + of_features / c), dtype=np.float64
    )


def _expert_parameters(columns: LayoutColumns, model: ModelShape) -> Floats:
    return np.asarray(model.num_expert_parameters / (columns.etp * columns.ep), dtype=np.float64)


def _end_parameters(columns: LayoutColumns, model: ModelShape) -> tuple[Floats, Floats, Floats]:
    """Parameters of a rank: of a vocabulary's matrix, the positions, the final norm."""
    h, is_gpt = model.hidden_size / columns.tp_columns, model.family == "gpt"
    vocabulary = np.asarray(model.vocab_size * model.hidden_size / columns.tp_ranks)
    return (
        vocabulary,
        model.seq_length * h if is_gpt else 0.0 * h,
        2 * h if model.has_layer_norms else h,
    )


def whole_layers(
    columns: LayoutColumns, model: ModelShape, stage: NDArray[Any], layers: StageLayers
) -> tuple[Floats, Floats]:
    """Whole parameters beside a rank's shares: of weights (ZeRO-3), and of gradients (ZeRO-2, 3).

    They are those of two layers in succession, of which one may be the embedding or the output. A
    tied embedding's gradients are there from the output's backward pass to its own, where one rank
    has both. What no other rank shares is whole as it is. Kinds that follow each other anywhere
    in the model do so on each stage that has both.
    """
    is_shared, are_experts_shared = columns.zero_group_size > 1, columns.expert_zero_group_size > 1
    vocabulary, positions, final_norm = (
        np.where(is_shared, each, 0.0) for each in _end_parameters(columns, model)
    )

    def shared_of(shape: ModelShape) -> Floats:
        others = np.where(is_shared, _layer_parameters(columns, shape), 0.0)
        return others + np.where(are_experts_shared, _expert_parameters(columns, shape), 0.0)

    codes, numbers = layer_shapes(model).codes, (*layers.of_shape, layers.of_last)
    each, two = [shared_of(shape) for shape in layers.shapes], np.zeros(())
    for one, next_one in dict.fromkeys(pairwise(codes)):
        least = 1 if one == next_one else 0
        has_both = (numbers[one] > least) & (numbers[next_one] > least)
        two = np.maximum(two, np.where(has_both, each[one] + each[next_one], 0.0))
    first, last = stage == 0, stage == columns.last_rank
    largest = layers.largest(shared_of)
    begin = np.where(first & (numbers[codes[0]] > 0), each[codes[0]], largest)
    end = np.where(last & (numbers[codes[-1]] > 0), each[codes[-1]], largest)
    if not layers.shapes[-1].layer_kinds:
        end = np.where(layers.number > 0, end, shared_of(layers.shapes[-1].dense))
    if depths := model.num_mtp_layers:
        of_depths, of_experts = _mtp_parameters(columns, model)
        depth = np.where(is_shared, of_depths, 0.0) + np.where(are_experts_shared, of_experts, 0.0)
        end = np.where(last, np.maximum(end, depth / depths), end)

    def pair(matrix: Floats) -> Floats:
        after = begin + np.where(first, matrix + positions, 0.0)
        before = end + np.where(last, matrix + final_norm, 0.0)
        return np.asarray(np.maximum(two, np.maximum(after, before)), dtype=np.float64)

    has_both = (columns.pp == 1) & model.tied_embeddings
    gathered = pair(vocabulary)
    return gathered, np.where(has_both, pair(0.0 * vocabulary) + vocabulary, gathered)

"""Parameters that a rank holds of a pipeline stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layout_tuner.array_types import Floats
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape


def of_layers(model: ModelShape, dense_share: Floats, of: Callable[[ModelShape], Floats]) -> Floats:
    """The mean of a quantity over the layers of a stage."""
    value = of(model)
    return value + dense_share * (of(model.dense) - value) if model.num_dense_layers else value


def stage_parameters(
    columns: LayoutColumns,
    model: ModelShape,
    stage: NDArray[Any],
    num_layers: Floats,
    dense_share: Floats,
) -> tuple[Floats, Floats, Floats]:
    """Parameters that one rank of the stage holds: outside of experts, experts, those of layers.

    With several stages and a tied embedding, the last stage holds a copy of it.
    """
    vocabulary, positions, final_norm = _end_parameters(columns, model)
    layer = of_layers(model, dense_share, lambda shape: _layer_parameters(columns, shape))
    experts = of_layers(model, dense_share, lambda shape: _expert_parameters(columns, shape))
    first, last = stage == 0, stage == columns.last_rank
    owns_output = last & ((columns.pp > 1) | (not model.tied_embeddings))
    others = (
        num_layers * layer
        + np.where(first, vocabulary + positions, 0.0)
        + np.where(last, final_norm, 0.0)
        + np.where(owns_output, vocabulary, 0.0)
    )
    of_layers_alone = num_layers * (layer + experts)
    return np.asarray(others, dtype=np.float64), num_layers * experts, of_layers_alone


def _layer_parameters(columns: LayoutColumns, model: ModelShape) -> Floats:
    """Parameters of a block that a rank holds outside of experts.

    Matrices and the biases of column-parallel matrices are split over tp. Norms, the biases of
    row-parallel matrices, and routers are replicated. Tensor columns split matrices, norms and the
    biases of row-parallel ones.
    """
    h, c, is_gpt = float(model.hidden_size), columns.tp_columns, model.family == "gpt"
    # gpt: two norms of weight and bias, two row-parallel biases.
    of_features = 6.0 * h if is_gpt else 2.0 * h
    replicated = 0.0 if is_gpt else h * model.num_experts
    replicated += 2 * model.head_size if model.qk_norm else 0
    shared = model.num_layer_parameters - model.num_expert_parameters - replicated - of_features
    width = model.query_size + 2.0 * model.kv_hidden_size + model.ffn_hidden_size
    biases = width * (c - 1.0) if is_gpt else 0.0  # beyond 1 / c of them
    return np.asarray(
        (shared + biases) / columns.tp_ranks + (replicated + of_features / c), dtype=np.float64
    )


def _expert_parameters(columns: LayoutColumns, model: ModelShape) -> Floats:
    return np.asarray(model.num_expert_parameters / (columns.etp * columns.ep), dtype=np.float64)


def _end_parameters(columns: LayoutColumns, model: ModelShape) -> tuple[Floats, Floats, Floats]:
    """Parameters of a rank: of a vocabulary's matrix, the positions, the final norm."""
    h, is_gpt = model.hidden_size / columns.tp_columns, model.family == "gpt"
    vocabulary = np.asarray(model.vocab_size * model.hidden_size / columns.tp_ranks)
    return vocabulary, model.seq_length * h if is_gpt else 0.0 * h, 2 * h if is_gpt else h


def whole_layers(
    columns: LayoutColumns,
    model: ModelShape,
    stage: NDArray[Any],
    num_layers: Floats,
    dense_share: Floats,
) -> tuple[Floats, Floats]:
    """Whole parameters beside a rank's shares: of weights (ZeRO-3), and of gradients (ZeRO-2, 3).

    They are those of two layers in succession, of which one may be the embedding or the output. A
    tied embedding's gradients are there from the output's backward pass to its own, where one rank
    has both. What no other rank shares is whole as it is.
    """
    is_shared, are_experts_shared = columns.zero_group_size > 1, columns.expert_zero_group_size > 1
    vocabulary, positions, final_norm = (
        np.where(is_shared, each, 0.0) for each in _end_parameters(columns, model)
    )

    def shared_of(shape: ModelShape) -> Floats:
        others = np.where(is_shared, _layer_parameters(columns, shape), 0.0)
        return others + np.where(are_experts_shared, _expert_parameters(columns, shape), 0.0)

    num_dense = np.round(dense_share * num_layers)  # those come first
    layer, dense = shared_of(model), shared_of(model.dense)
    begin = np.where(num_dense > 0, dense, layer)
    end = np.where(num_layers > num_dense, layer, dense)
    two = np.where(num_layers > 1, begin + end, 0.0)
    two = np.maximum(two, np.where(num_layers > num_dense + 1, 2 * layer, 0.0))
    two = np.maximum(two, np.where(num_dense > 1, 2 * dense, 0.0))
    first, last = stage == 0, stage == columns.last_rank

    def pair(matrix: Floats) -> Floats:
        after = begin + np.where(first, matrix + positions, 0.0)
        before = end + np.where(last, matrix + final_norm, 0.0)
        return np.asarray(np.maximum(two, np.maximum(after, before)), dtype=np.float64)

    has_both = (columns.pp == 1) & model.tied_embeddings
    gathered = pair(vocabulary)
    return gathered, np.where(has_both, pair(0.0 * vocabulary) + vocabulary, gathered)

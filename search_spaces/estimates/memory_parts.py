"""The formulae behind the peak of a stage: states, activations in flight, logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from search_spaces.columns import LayoutColumns, code_of
from search_spaces.estimates.storage import TrainerStorage
from search_spaces.model_shape import ModelShape

Floats = NDArray[np.float64]

_MASTER_BYTES: Final = 4.0
_MOMENTS_BYTES: Final = 8.0
_FP32_BYTES: Final = 4.0
_HALF_BYTES: Final = 2.0

_FP32: Final = code_of("precision", "fp32")
_FP16: Final = code_of("precision", "fp16")
_FULL: Final = code_of("recompute", "full")
_SELECTIVE: Final = code_of("recompute", "selective")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageParts:
    """The parts of `search_spaces.estimates.memory.StageMemory` as arrays."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    gathered: Floats
    backward: Floats
    head: Floats
    storage: TrainerStorage

    @property
    def terms(self) -> tuple[Floats, ...]:
        """In the order of `MEMORY_TERMS`."""
        return (
            self.weights + self.gradients,
            self.optimizer,
            self.activations,
            self.gathered * self.storage.gathered_share,
            np.maximum(self.backward, self.head),
            np.asarray(self.storage.workspace_bytes),
        )

    @property
    def total(self) -> Floats:
        total: Floats = sum(self.terms[1:], start=self.terms[0])
        return total


def stage_parts(
    columns: LayoutColumns, model: ModelShape, stage: NDArray[Any], storage: TrainerStorage
) -> StageParts:
    layers = layers_of_stage(columns.pp, stage, model, storage)
    parameters = _stage_parameters(columns, model, stage, layers)
    element = np.where(columns.precision == _FP32, _FP32_BYTES, _HALF_BYTES)
    # fp32 training has one copy of the weights; 16-bit training keeps fp32 masters beside them.
    states = _MOMENTS_BYTES + np.where(columns.precision == _FP32, 0.0, _MASTER_BYTES)
    shards = columns.zero_group_size
    gradients = parameters * _gradient_bytes(columns, storage)
    if storage.zero_shards_gradients:
        gradients = gradients / shards
    token_bytes = element * model.seq_length * columns.micro_batch_size
    kept_bytes = token_bytes * layers * _in_flight(columns, stage)
    return StageParts(
        weights=parameters * element,
        gradients=gradients,
        optimizer=parameters * states / shards,
        activations=kept_bytes * _kept_elements(columns, model, storage),
        gathered=kept_bytes * _gathered_elements(columns, model),
        backward=token_bytes * _backward_elements(columns, model, storage),
        head=np.where(stage == columns.pp - 1, _head_bytes(columns, model, storage), 0.0),
        storage=storage,
    )


def layers_of_stage(
    pp: NDArray[Any], stage: NDArray[Any], model: ModelShape, storage: TrainerStorage
) -> Floats:
    """Layers on a stage.

    Split evenly, the first stages have one more where pp does not divide them. Nanotron closes a
    stage with the block that brings the work beyond the stage's share, where the output projection
    is work too (`build_model` there): the first stages have more, the last one has fewer.
    """
    if storage.layer_split == "even":
        return np.asarray(
            model.num_layers // pp + (stage < model.num_layers % pp), dtype=np.float64
        )
    block = model.num_layer_matrix_parameters
    share = (model.num_layers + model.vocab_size * model.hidden_size / block) / pp
    until = _layers_until(stage + 1, share, pp, model)
    return until - np.where(stage == 0, 0.0, _layers_until(stage, share, pp, model))


def _layers_until(
    stages: NDArray[Any], share: Floats, pp: NDArray[Any], model: ModelShape
) -> Floats:
    """Layers on so many first stages, where each is closed by the block that overfills it."""
    closed = np.where(share < 1, stages, np.floor(share * stages) + 1.0)
    return np.where(stages >= pp, model.num_layers, np.minimum(closed, model.num_layers))


def _gradient_bytes(columns: LayoutColumns, storage: TrainerStorage) -> Floats | float:
    if storage.fp16_gradient_bytes is None:
        return storage.gradient_bytes
    is_fp16 = columns.precision == _FP16
    return np.where(is_fp16, storage.fp16_gradient_bytes, storage.gradient_bytes)


def _stage_parameters(
    columns: LayoutColumns, model: ModelShape, stage: NDArray[Any], num_layers: Floats
) -> Floats:
    """Parameters that one rank of the stage holds.

    Matrices, and the biases of column-parallel ones, are shared over tp; norms, the biases of
    row-parallel matrices and the positions are replicated. Where the embedding is tied and there
    are several stages, the last one holds a copy of it.
    """
    h = model.hidden_size
    if model.family == "gpt":
        replicated = 6.0 * h  # two norms of weight and bias, two row-parallel biases
        positions, final_norm = model.seq_length * h, 2 * h
    else:
        replicated = 2.0 * h
        positions, final_norm = 0, h
    shared = model.num_layer_parameters - replicated
    layers = num_layers * (shared / columns.tp + replicated)
    embedding = model.vocab_size * h / columns.tp
    first, last = stage == 0, stage == columns.pp - 1
    owns_output = last & ((columns.pp > 1) | (not model.tied_embeddings))
    return np.asarray(
        layers
        + np.where(first, embedding + positions, 0.0)
        + np.where(last, final_norm, 0.0)
        + np.where(owns_output, embedding, 0.0),
        dtype=np.float64,
    )


def _kept_elements(columns: LayoutColumns, model: ModelShape, storage: TrainerStorage) -> Floats:
    """Elements a token that a layer keeps for the backward pass, all but what was gathered."""
    whole = _layer_elements(columns, model, storage, fused_attention=storage.fused_attention)
    selective = _layer_elements(columns, model, storage, fused_attention=True)
    return np.select(
        [columns.recompute == _FULL, columns.recompute == _SELECTIVE],
        [_residual_elements(columns, model), selective],
        whole,
    )


def _gathered_elements(columns: LayoutColumns, model: ModelShape) -> Floats:
    """Elements a token that a layer's column-parallel matrices add where their inputs stay gathered."""
    beyond = 2.0 * (model.hidden_size - _residual_elements(columns, model))
    return np.asarray(np.where(columns.recompute == _FULL, 0.0, beyond), dtype=np.float64)


def _backward_elements(
    columns: LayoutColumns, model: ModelShape, storage: TrainerStorage
) -> Floats:
    """Elements a token that the backward pass of a layer holds at once beside what was kept.

    It peaks inside the feed-forward, with the gradients of the layer's output, of the activation's
    output, and, by then in place of that output itself, of its input: h + f for GELU, h + 3 f for
    SwiGLU, whose input is twice as wide and whose activation is made again. With full recomputation
    the layer was brought back, except for its input, which had been kept.
    """
    h, f = model.hidden_size, model.ffn_hidden_size
    made = h + (3.0 if model.family == "llama" else 1.0) * f / columns.tp
    whole = _layer_elements(columns, model, storage, fused_attention=storage.fused_attention)
    share = _residual_elements(columns, model)
    whole += storage.gathered_share * 2.0 * (h - share)
    revived = np.where(columns.recompute == _FULL, whole - share, 0.0)
    under_way = np.where(columns.vpp > 1, 2.0 * share, 0.0)
    return np.asarray(made + revived + under_way, dtype=np.float64)


def _head_bytes(columns: LayoutColumns, model: ModelShape, storage: TrainerStorage) -> Floats:
    """Bytes that the end of the model takes between its last layer's two passes.

    With 16 bits there are two sets of logits for a while, which weigh more than one and the gradient
    of the projection's input. Nothing is going to a next stage.
    """
    is_fp32 = columns.precision == _FP32
    element = np.where(is_fp32, _FP32_BYTES, _HALF_BYTES)
    logit_bytes = np.where(is_fp32, 0.0, _HALF_BYTES) + storage.fp32_logits * _FP32_BYTES
    logits = model.vocab_size / columns.tp * logit_bytes
    norm_input = _residual_elements(columns, model)
    head_input = norm_input + storage.gathered_share * (model.hidden_size - norm_input)
    gradient = np.where(is_fp32, model.hidden_size, 0.0)
    coming = np.where(columns.vpp > 1, _residual_elements(columns, model), 0.0)
    others = element * (norm_input + head_input + gradient + coming)
    tokens = model.seq_length * columns.micro_batch_size
    return np.asarray(tokens * (logits + others), dtype=np.float64)


def _layer_elements(
    columns: LayoutColumns, model: ModelShape, storage: TrainerStorage, *, fused_attention: bool
) -> Floats:
    """Elements a token that one layer keeps for its backward pass.

    Korthikanti et al. (arXiv:2205.05198, equation 2) count s b h (10 + 24/t + 5 a s / (h t)) bytes
    at 16 bits for GPT. Without dropout, and in elements: the inputs of two norms and of two
    column-parallel matrices are replicated over tp (4 h), or shared with sequence parallelism (the
    matrices' stay whole where they are not gathered again: `_gathered_elements`); query, key, value and the attention's output
    are shared over tp, as is the feed-forward's inside (2 f for GELU's input and output; 4 f for
    SwiGLU's gate, its activation, up, and their product, or 3 f without the activation). Attention
    that is not fused keeps its probabilities: a s.
    """
    h, f = model.hidden_size, model.ffn_hidden_size
    inputs = 4.0 * _residual_elements(columns, model)
    attention = h + 2.0 * model.kv_hidden_size + h
    if not fused_attention:
        attention += model.num_heads * model.seq_length
    parts = 2.0
    if model.family == "llama":
        parts = 3.0 if storage.fused_swiglu else 4.0
    feed_forward = parts * f
    return np.asarray(inputs + (attention + feed_forward) / columns.tp, dtype=np.float64)


def _residual_elements(columns: LayoutColumns, model: ModelShape) -> Floats:
    """Elements a token that a rank holds of the residual stream, between layers and stages."""
    shares = np.where(columns.sequence_parallel == 1, columns.tp, 1)
    return np.asarray(model.hidden_size / shares, dtype=np.float64)


def _in_flight(columns: LayoutColumns, stage: NDArray[Any]) -> Floats:
    """Micro-batches whose activations a rank holds at once, over all its layers.

    Plain 1F1B: min(m, p - i). Interleaved: one more pass than the warm-up of
    2 (p - 1 - i) + (v - 1) p has, of v chunks each (arXiv:2104.04473); on the first rank that is p
    times 1 + (p - 1) / (p v) (arXiv:2205.05198, section 4.2.3).
    """
    later, vpp = columns.pp - 1 - stage, columns.vpp
    plain = np.minimum(columns.num_microbatches, later + 1.0)
    passes = np.minimum(columns.num_microbatches * vpp, 2.0 * later + (vpp - 1) * columns.pp + 1)
    return np.asarray(np.where(vpp > 1, passes / vpp, plain), dtype=np.float64)

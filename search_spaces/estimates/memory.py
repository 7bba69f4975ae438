"""The peak memory of a pipeline stage in closed form, over one layout or over columns of many.

What is counted: weights, gradients and optimizer states of the stage; the activations of the
micro-batches that are in flight under 1F1B, plain or interleaved; what the backward pass of a layer
makes at once; the logits where the output projection is. What is not: the statistics of norms and
attention, and the allocator's fragmentation; workspaces are a constant. The embedded trainer's
logical peak on the CPU is 0 to 4 % higher than these sums. `storage` has what other trainers keep,
`tuner.calibration.memory` how far the sums can be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from search_spaces.columns import LayoutColumns, code_of
from search_spaces.estimates.storage import EMBEDDED_TRAINER, TrainerStorage
from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape

__all__ = [
    "EMBEDDED_TRAINER",
    "MEMORY_TERMS",
    "MemoryTerms",
    "StageMemory",
    "TrainerStorage",
    "memory_terms",
    "peak_memory_bytes",
    "stage_memory",
    "stage_terms",
]

Floats = NDArray[np.float64]

_MASTER_BYTES: Final = 4.0
_MOMENTS_BYTES: Final = 8.0
_FP32_BYTES: Final = 4.0
_HALF_BYTES: Final = 2.0

_FP32: Final = code_of("precision", "fp32")
_FP16: Final = code_of("precision", "fp16")
_FULL: Final = code_of("recompute", "full")
_SELECTIVE: Final = code_of("recompute", "selective")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Estimated peak memory of each rank of one pipeline stage, in bytes."""

    stage: int
    """Position in the pipeline, from 0."""
    weights_bytes: float
    """Parameters in the precision of the matrix multiplications."""
    gradients_bytes: float
    """Gradients."""
    optimizer_bytes: float
    """Adam's two moments, and the fp32 master weights where the weights are of 16 bits."""
    activations_bytes: float
    """What is kept for the backward pass, of every micro-batch in flight."""
    backward_bytes: float
    """What a layer's backward pass makes at once; full recomputation brings the layer back first.
    Interleaving has a tensor coming and one going meanwhile."""
    head_bytes: float
    """Logits, their softmax and their gradient, inputs of the final norm and of the output
    projection; on the last stage alone."""
    workspace_bytes: float
    """Workspaces of libraries and buffers of collectives."""

    @property
    def total_bytes(self) -> float:
        """The sum of the parts; the head's are gone when the first layer goes backward."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + max(self.backward_bytes, self.head_bytes)
            + self.workspace_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Parts:
    """The parts of `StageMemory` as arrays."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    backward: Floats
    head: Floats
    workspace: float

    @property
    def total(self) -> Floats:
        states = self.weights + self.gradients + self.optimizer
        passes = self.activations + np.maximum(self.backward, self.head)
        total: Floats = states + passes + self.workspace
        return total

    @property
    def terms(self) -> tuple[Floats, ...]:
        """In the order of `MEMORY_TERMS`."""
        return (
            self.weights + self.gradients,
            self.optimizer,
            self.activations,
            np.maximum(self.backward, self.head),
            np.asarray(self.workspace),
        )


MEMORY_TERMS: Final = ("states", "sharded_states", "activations", "passing", "workspace")
"""What a peak is the sum of: weights and gradients, which each replica holds; the optimizer's states;
what is kept for the backward pass; what passes (the larger of a layer's backward pass and of the
logits); and the workspace."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryTerms:
    """Bytes of each of `MEMORY_TERMS`, of the first stage and of the last."""

    num_bytes: Floats
    """Shape [2, number of terms, layouts]."""


def peak_memory_bytes(
    layouts: Layout | LayoutColumns,
    model: ModelShape,
    storage: TrainerStorage = EMBEDDED_TRAINER,
) -> Floats:
    """Estimated peak memory of the fullest rank of each layout, in bytes.

    The fullest stage is the first or the last: a stage between them has at most the layers of the
    first, no embedding, and at most as many micro-batches in flight.
    """
    columns = LayoutColumns.of(layouts)
    first = _stage_parts(columns, model, np.zeros_like(columns.pp), storage).total
    last = _stage_parts(columns, model, columns.pp - 1, storage).total
    return np.maximum(first, last)


def memory_terms(
    layouts: Layout | LayoutColumns,
    model: ModelShape,
    storage: TrainerStorage = EMBEDDED_TRAINER,
) -> MemoryTerms:
    """What the peaks of the first and of the last stage are the sums of, for many layouts."""
    columns = LayoutColumns.of(layouts)
    shape = np.shape(columns.num_devices * columns.micro_batch_size * columns.num_microbatches)
    num_bytes = np.empty((2, len(MEMORY_TERMS), int(np.prod(shape, dtype=np.int64))))
    for row, stage in enumerate((np.zeros_like(columns.pp), columns.pp - 1)):
        for term, values in enumerate(_stage_parts(columns, model, stage, storage).terms):
            num_bytes[row, term] = np.broadcast_to(values, shape).ravel()
    return MemoryTerms(num_bytes=num_bytes)


def stage_terms(
    layout: Layout, stage: int, model: ModelShape, storage: TrainerStorage = EMBEDDED_TRAINER
) -> Floats:
    """Bytes of each of `MEMORY_TERMS` on one stage of a layout."""
    parts = _stage_parts(LayoutColumns.of(layout), model, np.asarray(stage), storage)
    return np.array([float(values) for values in parts.terms])


def stage_memory(
    layout: Layout, model: ModelShape, storage: TrainerStorage = EMBEDDED_TRAINER
) -> list[StageMemory]:
    """Estimated memory of each pipeline stage, first stage first."""
    columns = LayoutColumns.of(layout)
    stages = []
    for stage in range(layout.pp):
        parts = _stage_parts(columns, model, np.asarray(stage), storage)
        stages.append(
            StageMemory(
                stage=stage,
                weights_bytes=float(parts.weights),
                gradients_bytes=float(parts.gradients),
                optimizer_bytes=float(parts.optimizer),
                activations_bytes=float(parts.activations),
                backward_bytes=float(parts.backward),
                head_bytes=float(parts.head),
                workspace_bytes=parts.workspace,
            )
        )
    return stages


def _stage_parts(
    columns: LayoutColumns, model: ModelShape, stage: NDArray[Any], storage: TrainerStorage
) -> _Parts:
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
    return _Parts(
        weights=parameters * element,
        gradients=gradients,
        optimizer=parameters * states / shards,
        activations=token_bytes * layers * _kept_elements(columns, model, stage, storage),
        backward=token_bytes * _backward_elements(columns, model, storage),
        head=np.where(stage == columns.pp - 1, _head_bytes(columns, model, storage), 0.0),
        workspace=storage.workspace_bytes,
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


def _kept_elements(
    columns: LayoutColumns, model: ModelShape, stage: NDArray[Any], storage: TrainerStorage
) -> Floats:
    """Elements a token that a layer keeps for the backward pass, all micro-batches in flight."""
    whole = _layer_elements(columns, model, storage, fused_attention=storage.fused_attention)
    selective = _layer_elements(columns, model, storage, fused_attention=True)
    of_layer = np.select(
        [columns.recompute == _FULL, columns.recompute == _SELECTIVE],
        [_residual_elements(columns, model), selective],
        whole,
    )
    return np.asarray(_in_flight(columns, stage) * of_layer, dtype=np.float64)


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
    norm_input, head_input = _input_elements(columns, model, storage)
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
    column-parallel matrices are replicated over tp (4 h; sequence parallelism shares the norms', and
    the matrices' too where they are gathered again); query, key, value and the attention's output
    are shared over tp, as is the feed-forward's inside (2 f for GELU's input and output; 4 f for
    SwiGLU's gate, its activation, up, and their product, or 3 f without the activation). Attention
    that is not fused keeps its probabilities: a s.
    """
    h, f = model.hidden_size, model.ffn_hidden_size
    norm_input, column_input = _input_elements(columns, model, storage)
    replicated = 2.0 * (norm_input + column_input)
    attention = h + 2.0 * model.kv_hidden_size + h
    if not fused_attention:
        attention += model.num_heads * model.seq_length
    parts = 2.0
    if model.family == "llama":
        parts = 3.0 if storage.fused_swiglu else 4.0
    feed_forward = parts * f
    return np.asarray(replicated + (attention + feed_forward) / columns.tp, dtype=np.float64)


def _input_elements(
    columns: LayoutColumns, model: ModelShape, storage: TrainerStorage
) -> tuple[Floats, Floats]:
    """Elements a token that are kept of a norm's input, and of a column-parallel matrix's."""
    share = _residual_elements(columns, model)
    whole = np.full(columns.tp.shape, float(model.hidden_size))
    return share, whole if storage.keeps_gathered_inputs else share


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

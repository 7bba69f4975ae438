"""The peak memory of a pipeline stage in closed form, over one layout or over columns of many.

Counted are: weights, gradients and optimizer states of the stage; activations of the micro-batches
in flight under 1F1B, plain or interleaved; the tensors of one layer's backward pass; the logits on
the last stage. Not counted are: statistics of norms and attention, and the allocator's
fragmentation; workspaces are a constant. The embedded trainer's logical peak on the CPU is 0 to 4 %
higher than these sums. `storage` describes other trainers, and
`predictions.belief.peaks.corrected_peak` corrects the sums by measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from layout_tuner.array_types import Floats, Ints
from layout_tuner.documents.reading import MAX_COUNT
from layout_tuner.predictions.estimates.activations import (
    FP32_BYTES,
    HALF_BYTES,
    backward_elements,
    element_bytes,
    gathered_elements,
    held_tokens,
    kept_elements,
    late_elements,
    mtp_elements,
    residual_elements,
    weight_bytes,
)
from layout_tuner.predictions.estimates.distinct_rows import distinct
from layout_tuner.predictions.estimates.rank_stages import (
    HELD_ROUNDS,
    RankStages,
    StageLayers,
    layer_shapes,
)
from layout_tuner.predictions.estimates.stage_parameters import stage_parameters, whole_layers
from layout_tuner.predictions.estimates.trainer_storage import (
    EMBEDDED_TRAINER,
    TrainerStorage,
    layers_of_stage,
)
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns, code_of
from layout_tuner.search_spaces.models.model_shape import ModelShape

_MOMENTS_BYTES: Final = (8.0, 4.0)
"""Bytes of Adam's two moments by the code of `optimizer_states`."""
_LAYERS_HELD: Final = 3.0
"""Layers whose activations are on the device where they are offloaded: the last two, which
Megatron-LM never offloads (`--cpu-offloading-num-layers` is below the layers less one), and one on
its way."""

_FP32: Final = code_of("precision", "fp32")
_FP16: Final = code_of("precision", "fp16")
_BF16: Final = code_of("precision", "bf16")
_FULL: Final = code_of("recompute", "full")
_GPIPE: Final = code_of("schedule", "gpipe")
_ZERO_BUBBLE: Final = code_of("schedule", "zero_bubble")
_ACTIVATIONS: Final = code_of("offload", "activations")
_OPTIMIZER: Final = code_of("offload", "optimizer")

_LAYER_KNOBS: Final = (
    *("tp", "tp_columns", "cp", "ep", "etp", "vpp", "schedule", "cp_comm_type", "recompute"),
    *("sequence_parallel", "precision"),
)
"""What the elements per token of a layer depend on (`activations`)."""

_CHUNK: Final = 4096
"""Layouts that are computed together: the intermediate arrays fit into the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Estimated peak memory of each rank of one pipeline stage, in bytes."""

    stage: int
    """Position in the pipeline, from 0."""
    weights_bytes: float
    """Parameters in the precision of the matrix multiplications."""
    gradients_bytes: float
    optimizer_bytes: float
    """Adam's two moments, and the fp32 master weights where the weights are of 16 bits."""
    activations_bytes: float
    """Activations kept for the backward pass, of every micro-batch in flight."""
    backward_bytes: float
    """Tensors of one layer's backward pass. With full recomputation they include the layer's
    activations, with interleaving one tensor that is received and one that is sent."""
    head_bytes: float
    """Logits, their softmax and gradient, and the inputs of the final norm and the output
    projection; only on the last stage."""
    workspace_bytes: float
    """Workspaces of libraries and buffers of collectives."""
    mtp_bytes: float = 0.0
    """What multi-token prediction adds to all of these together."""

    @property
    def total_bytes(self) -> float:
        """The sum of the parts; the head's are freed before the first layer's backward pass."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + max(self.backward_bytes, self.head_bytes)
            + self.workspace_bytes
        )


MEMORY_TERMS: Final = (
    "states",
    "sharded_states",
    "activations",
    "gathered",
    "passing",
    "workspace",
)
"""The terms of a peak: weights and gradients, which each replica holds below ZeRO-2 and 3;
optimizer states;
activations kept for the backward pass; gathered inputs that are kept too; temporary tensors (the
larger of a layer's backward pass and the logits); the workspace."""

NUM_MEMORY_FACTORS: Final = len(MEMORY_TERMS) + 1
"""Factors that a calibration corrects: one for each term, and one for the sum."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryTerms:
    """The terms of the peaks of many layouts, or of many stages."""

    num_bytes: NDArray[np.floating[Any]]
    """Expected bytes of each of `MEMORY_TERMS`, of two stages one of which is the fullest; shape
    [2, number of terms, layouts]."""
    gathered_deviation_bytes: NDArray[np.floating[Any]]
    """Standard deviation of the term of gathered inputs; shape [2, layouts]."""
    scatter_bytes: NDArray[np.floating[Any]]
    """Standard deviation that is independent for each layout; shape [2, layouts]."""
    storage: TrainerStorage
    """What the trainer is taken to store; its spread makes the other deviations."""
    knob_bytes: NDArray[np.floating[Any]] | None = None
    """Standard deviation of what each value of a job knob adds; shape [2, values, layouts]. None:
    no layout has settings."""

    def rows(self, rows: slice | Ints | list[int]) -> MemoryTerms:
        """The terms of some layouts."""
        names = ("num_bytes", "gathered_deviation_bytes", "scatter_bytes")
        of_knobs = None if self.knob_bytes is None else self.knob_bytes[..., rows]
        some = {name: getattr(self, name)[..., rows] for name in names}
        return replace(self, **some, knob_bytes=of_knobs)

    @property
    def deviation_bytes(self) -> NDArray[np.floating[Any]]:
        """Standard deviation of each term, and of the factor on all terms; computed anew.

        Shape [2, number of terms + 1, layouts].
        """
        ends, _, count = self.num_bytes.shape
        deviations = np.empty((ends, NUM_MEMORY_FACTORS, count), self.num_bytes.dtype)
        spread = self.storage.spread
        relative = (spread.states, spread.sharded_states, spread.activations, 0.0, spread.passing)
        np.multiply(self.num_bytes[:, :5], np.array(relative)[:, None], out=deviations[:, :5])
        deviations[:, 3] = self.gathered_deviation_bytes
        deviations[:, 5] = spread.workspace_bytes
        np.multiply(self.num_bytes.sum(axis=1), spread.whole, out=deviations[:, 6])
        return deviations


def peak_memory_bytes(
    layouts: Layout | LayoutColumns, model: ModelShape, storage: TrainerStorage = EMBEDDED_TRAINER
) -> Floats:
    """Estimated peak memory of the fullest rank of each layout, in bytes."""
    columns = LayoutColumns.of(layouts)
    early, last = (
        stage_parts(columns, model, stage, storage).total
        for stage in _fullest_stages(columns, model, storage)
    )
    return np.maximum(early, last)


def _fullest_stages(
    columns: LayoutColumns, model: ModelShape, storage: TrainerStorage
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Two stages one of which is the fullest: one of the others, and the last.

    A stage between the ends has no embedding, at most as many micro-batches in flight as those
    before it, and at most as many layers as the second. The second has more layers than the first
    only where the embedding counts as one. Each is looked at where stages recompute different
    numbers of layers or are written out, of V-shaped schedules, and where layers are unlike.
    """
    fullest, last = np.zeros_like(columns.pp), columns.pp - 1
    is_by_rank = (columns.of_recompute_layers(len) > 1) | _has_unlike_stages(model)
    if (own := RankStages.of(columns, model)) is not None:
        is_by_rank = is_by_rank | own.is_own
    is_counted = columns.counted_ends[0] > 0
    if not np.any(is_counted | is_by_rank):
        return fullest, last
    if columns.tp.ndim == 1 and columns.tp.size > 1:  # few layouts of many
        rows = np.flatnonzero(is_counted | is_by_rank)
        if len(rows) < columns.tp.size:
            fullest[rows] = _fullest_stages(columns.rows(rows), model, storage)[0]
            return fullest, last
    ranks = int(np.max(np.where(is_by_rank, columns.pp, 2)))
    number = np.arange(ranks).reshape(-1, *[1] * columns.tp.ndim)
    stages = np.minimum(number, last)
    totals = stage_parts(columns, model, stages, storage, own).total
    may_be = is_by_rank | (number == 0) | (is_counted & (number == 1))
    place = np.nanargmax(np.where(may_be, totals, -np.inf), axis=0)
    return np.take_along_axis(stages, np.asarray(place)[None], axis=0)[0], last


def _has_unlike_stages(model: ModelShape) -> bool:
    """Whether a stage between the ends may be the fullest, since its layers are others.

    In other models than those with latents and kinds only the first layers, without experts, are
    unlike, and the first stage has the most micro-batches.
    """
    is_new = model.layer_kinds or model.experts_every or model.kv_lora_rank
    return bool(is_new) and len(layer_shapes(model).shapes) > 1


def memory_terms(
    layouts: Layout | LayoutColumns,
    model: ModelShape,
    storage: TrainerStorage = EMBEDDED_TRAINER,
    *,
    dtype: type[np.floating[Any]] = np.float64,
) -> MemoryTerms:
    """The terms of the peaks of the two stages that may be the fullest, for many layouts.

    Columns are broadcast against each other and flattened. Searches of millions of layouts keep the
    terms in single precision.
    """
    columns = LayoutColumns.of(layouts).flattened()
    terms = _no_terms(2, columns.tp.size, storage, dtype)
    for start in range(0, columns.tp.size, _CHUNK):
        rows = slice(start, start + _CHUNK)
        part = columns.rows(rows)
        stages = np.stack(_fullest_stages(part, model, storage))
        _fill(terms, rows, stage_parts(part, model, stages, storage))
    return terms


def stage_terms(
    layout: Layout, model: ModelShape, storage: TrainerStorage = EMBEDDED_TRAINER
) -> MemoryTerms:
    """The terms of every stage of one layout; the axis of layouts is that of stages."""
    terms = _no_terms(1, layout.pp, storage)
    _fill(terms, slice(None), parts_by_stage(layout, model, storage))
    return terms


def parts_by_stage(
    layout: Layout, model: ModelShape, storage: TrainerStorage = EMBEDDED_TRAINER
) -> StageParts:
    """The parts of every stage of one layout; the last axis is that of stages."""
    return stage_parts(LayoutColumns.of(layout), model, np.arange(layout.pp), storage)


def _no_terms(
    num_ends: int, num_layouts: int, storage: TrainerStorage, dtype: type[Any] = np.float64
) -> MemoryTerms:
    return MemoryTerms(
        num_bytes=np.empty((num_ends, len(MEMORY_TERMS), num_layouts), dtype),
        gathered_deviation_bytes=np.empty((num_ends, num_layouts), dtype),
        scatter_bytes=np.empty((num_ends, num_layouts), dtype),
        storage=storage,
    )


def _fill(terms: MemoryTerms, rows: slice, parts: StageParts) -> None:
    """Writes the terms of some layouts and their standard deviations."""
    for term, values in enumerate(parts.terms):
        terms.num_bytes[:, term, rows] = values
    terms.gathered_deviation_bytes[:, rows] = parts.gathered * parts.storage.spread.gathered_share
    terms.scatter_bytes[:, rows] = parts.gathered * parts.storage.spread.gathered_scatter


def stage_memory(
    layout: Layout, model: ModelShape, storage: TrainerStorage = EMBEDDED_TRAINER
) -> list[StageMemory]:
    """Estimated memory of each pipeline stage, first stage first."""
    columns = LayoutColumns.of(layout)
    stages, plain = [], replace(model, num_mtp_layers=0) if model.num_mtp_layers else model
    for stage in range(layout.pp):
        parts = stage_parts(columns, model, np.asarray(stage), storage)
        without = (
            parts if plain is model else stage_parts(columns, plain, np.asarray(stage), storage)
        )
        kept = parts.gathered * storage.gathered_share
        stages.append(
            StageMemory(
                stage=stage,
                weights_bytes=float(parts.weights),
                gradients_bytes=float(parts.gradients),
                optimizer_bytes=float(parts.optimizer),
                activations_bytes=float(parts.activations + kept),
                backward_bytes=float(parts.backward),
                head_bytes=float(parts.head),
                workspace_bytes=storage.workspace_bytes,
                mtp_bytes=float(parts.total - without.total),
            )
        )
    return stages


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StageParts:
    """The parts of `predictions.estimates.peak_memory.StageMemory` as arrays."""

    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    gathered: Floats
    backward: Floats
    head: Floats
    storage: TrainerStorage

    @property
    def states(self) -> Floats:
        """What a rank holds from its start to its end; the embedded trainer at least so much."""
        return self.weights + self.gradients + self.optimizer

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
    columns: LayoutColumns,
    model: ModelShape,
    stage: NDArray[Any],
    storage: TrainerStorage,
    ranks: RankStages | None = None,
) -> StageParts:
    ranks = RankStages.of(columns, model) if ranks is None else ranks
    layers = layers_of_stage(columns.pp, stage, model, storage, columns.counted_ends)
    held = StageLayers.of(columns, stage, layers, model, ranks)
    layers, is_last = held.number, stage == columns.last_rank
    others, experts, in_layers = stage_parameters(columns, model, stage, held)
    element = element_bytes(columns)
    # fp32 training has one copy of the weights; 16-bit training keeps fp32 masters beside them.
    states = np.take(_MOMENTS_BYTES, columns.optimizer_states) + np.where(
        columns.precision == _FP32, 0.0, storage.master_bytes
    )
    own = others / columns.zero_group_size + experts / columns.expert_zero_group_size
    optimizer = own
    if storage.shards_bf16_states:
        is_sharded = (columns.precision == _BF16) & (columns.zero_stage == 0) & (columns.pp > 1)
        optimizer = np.where(is_sharded, others / columns.dp_cp + experts / columns.edp, own)
    zero, weights = columns.zero_stage, others + experts
    gradients = own if storage.zero_shards_gradients else weights
    if (zero >= 2).any():  # skipped for the many searches without them
        gathered, unsent = whole_layers(columns, model, stage, held)
        if storage.whole_beside_pipeline:
            whole = np.where(columns.zero_group_size > 1, others, 0.0)
            whole = whole + np.where(columns.expert_zero_group_size > 1, experts, 0.0)
            gathered = np.where(columns.pp > 1, whole, gathered)
            unsent = np.where(columns.pp > 1, whole, unsent)
        gradients = np.where(zero >= 2, own + unsent, gradients)
        shard = 0.0 if storage.shards_are_masters else own
        weights = np.where(zero == 3, shard + gathered, weights)
    token_bytes = element * held_tokens(columns, model)
    kept_bytes = token_bytes * _layers_in_flight(columns, stage, layers, ranks)
    if columns.offload.any():
        on_device = np.minimum(_LAYERS_HELD / np.maximum(layers, 1.0), 1.0)
        kept_bytes = kept_bytes * np.where(columns.offload == _ACTIVATIONS, on_device, 1.0)
        optimizer = np.where(columns.offload == _OPTIMIZER, 0.0, optimizer)
    kept, gathered, backward = _of_a_layer(columns, held, storage)
    share = columns.recomputing_share(stage, layers)
    if share is not None:
        plain = _of_a_layer(
            replace(columns, recompute=np.zeros_like(columns.recompute)), held, storage
        )
        # The layers that recompute are a chunk's first: the others have freed more by then than
        # these make again. Late weight gradients of whole layers that recompute count that.
        is_late = (columns.schedule == _ZERO_BUBBLE) & (columns.recompute == _FULL) & (share > 0.0)
        backward = np.where((share < 1.0) & ~is_late, plain[2], backward)
        kept, gathered = (
            share * each + (1.0 - share) * other
            for each, other in zip((kept, gathered), plain[:2], strict=True)
        )
    # A stage of the embedding alone sends its output, and has its gradient and an fp32 copy of it.
    of_embedding = residual_elements(columns, model) * (1.0 + FP32_BYTES / element)
    a_layer = kept + gathered * storage.gathered_share
    scheduled = _scheduled_bytes(columns, model, stage, storage, held, a_layer, ranks)
    activations, gathered = kept_bytes * kept + scheduled, kept_bytes * gathered
    if model.num_mtp_layers:
        of_depths = [token_bytes * each for each in mtp_elements(columns, model, storage)]
        activations = activations + np.where(is_last, of_depths[0], 0.0)
        gathered = gathered + np.where(is_last, of_depths[1], 0.0)
        of_depth = np.where(is_last, of_depths[2] / token_bytes, 0.0)
        backward = np.maximum(backward, of_depth)
    return StageParts(
        weights=weights * weight_bytes(columns, storage, in_layers, others + experts),
        gradients=gradients * _gradient_bytes(columns, storage),
        optimizer=optimizer * states,
        activations=activations,
        gathered=gathered,
        backward=token_bytes * np.where(layers > 0, backward, of_embedding),
        head=np.where(is_last, _head_bytes(columns, model, storage), 0.0),
        storage=storage,
    )


def _of_a_layer(
    columns: LayoutColumns, layers: StageLayers, storage: TrainerStorage
) -> tuple[Floats, Floats, Floats]:
    """Elements per token of a stage's layer that recomputes: kept, gathered, of a backward pass."""
    few, places = columns, None
    if columns.tp.ndim == 1 and columns.tp.size > 1:  # many layouts have few different layers
        places, examples = distinct(columns, _LAYER_KNOBS)
        few = columns.rows(examples)

    def on_all(of: Callable[[ModelShape], Floats]) -> Callable[[ModelShape], Floats]:
        return of if places is None else lambda shape: np.broadcast_to(of(shape), few.shape)[places]

    kept = layers.mean(on_all(lambda shape: kept_elements(few, shape, storage)))
    gathered = layers.mean(on_all(lambda shape: gathered_elements(few, shape)))
    backward = on_all(lambda shape: backward_elements(few, shape, storage))
    # A layer's backward pass comes when those behind it have freed what they kept.
    is_freed = ~columns.splits_backward & (columns.offload != _ACTIVATIONS)
    freed = np.where(is_freed, kept + gathered * storage.gathered_share, 0.0)
    return kept, gathered, layers.largest(backward, freed)


def _gradient_bytes(columns: LayoutColumns, storage: TrainerStorage) -> Floats | float:
    if storage.fp16_gradient_bytes is None:
        return storage.gradient_bytes
    is_fp16 = columns.precision == _FP16
    return np.where(is_fp16, storage.fp16_gradient_bytes, storage.gradient_bytes)


def _head_bytes(columns: LayoutColumns, model: ModelShape, storage: TrainerStorage) -> Floats:
    """Bytes of the head between the last layer's forward and backward pass.

    With 16 bits there are two sets of logits for a while, which are larger than one set and the
    gradient of the projection's input.
    """
    is_fp32 = columns.precision == _FP32
    logits = model.vocab_size / columns.tp_ranks * np.where(is_fp32, 0.0, HALF_BYTES)
    logits = logits / storage.logits_chunks
    gradient = np.where(is_fp32, model.hidden_size, 0.0)
    coming = np.where(columns.vpp > 1, residual_elements(columns, model), 0.0)
    others = logits + element_bytes(columns) * (gradient + coming)
    kept = _kept_by_head(columns, model, storage)
    return np.asarray(kept + held_tokens(columns, model) * others, dtype=np.float64)


def _kept_by_head(columns: LayoutColumns, model: ModelShape, storage: TrainerStorage) -> Floats:
    """Bytes that the head keeps of a micro-batch for its backward pass: logits and inputs.

    Each depth of multi-token prediction has a head, whose backward pass is after that of the first.
    """
    copies = storage.fp32_logits * FP32_BYTES / storage.logits_chunks
    logits = model.vocab_size / columns.tp_ranks * copies
    norm_input = residual_elements(columns, model)
    head_input = norm_input + storage.gathered_share * (model.hidden_size - norm_input)
    inputs = element_bytes(columns) * (norm_input + head_input)
    if storage.logits_chunks > 1:
        inputs = inputs + model.hidden_size * (element_bytes(columns) + FP32_BYTES)
    heads = 1 + model.num_mtp_layers
    return np.asarray(heads * held_tokens(columns, model) * (logits + inputs), dtype=np.float64)


def _layers_in_flight(
    columns: LayoutColumns, stage: NDArray[Any], layers: Floats, own: RankStages | None
) -> Floats:
    """Layers times the micro-batches whose activations each of them holds.

    Chunks of a rank have equally many layers, except for those of the counted embedding and head.
    At its peak the first rank has min(m, 2 p - 1) micro-batches in its first chunk and the last
    rank, when it computes the logits, one in its last chunk (from the tables of `schedules`).
    """
    in_flight = _in_flight(columns, stage)
    embedding, head = columns.counted_ends
    first = embedding * (stage == 0) * (columns.vpp > 1)
    last = head * (stage == columns.pp - 1) * (columns.vpp > 1)
    of_first = np.minimum(columns.num_microbatches, 2 * columns.pp - 1)
    missing = first * (in_flight - of_first) + last * (in_flight - 1.0)
    found = np.asarray(layers * in_flight + missing, dtype=np.float64)
    if own is None:
        return found
    return np.where(own.is_own & (columns.vpp > 1), own.in_flight(stage), found)


def most_held(columns: LayoutColumns) -> Ints:
    """Micro-batches beyond which more of them do not change the peak of any stage.

    See `_in_flight`: a pipeline holds at most p of them, or 2 p - 1 where it is interleaved.
    """
    most = np.where(columns.vpp > 1, 2 * columns.pp - 1, columns.pp)
    most = np.where(columns.is_v_shaped, HELD_ROUNDS * columns.pp, most)
    return np.where(columns.schedule == _GPIPE, MAX_COUNT, most)


def _in_flight(columns: LayoutColumns, stage: NDArray[Any]) -> Floats:
    """Micro-batches whose activations a rank holds at once, over all its layers.

    Plain 1F1B and zero bubble: min(m, p - i). GPipe: m. Interleaved: the warm-up of 2 (p - 1 - i) +
    (v - 1) p passes and one more, each of one of v chunks (arXiv:2104.04473). On the first rank
    this is p (1 + (p - 1) / (p v)) micro-batches (arXiv:2205.05198, section 4.2.3).
    """
    later, vpp = columns.pp - 1 - stage, columns.vpp
    plain = np.minimum(columns.num_microbatches, later + 1.0)
    plain = np.where(columns.schedule == _GPIPE, columns.num_microbatches, plain)
    passes = np.minimum(columns.num_microbatches * vpp, 2.0 * later + (vpp - 1) * columns.pp + 1)
    return np.asarray(np.where(vpp > 1, passes / vpp, plain), dtype=np.float64)


def _scheduled_bytes(
    columns: LayoutColumns,
    model: ModelShape,
    stage: NDArray[Any],
    storage: TrainerStorage,
    layers: StageLayers,
    kept: Floats,
    own: RankStages | None,
) -> Floats:
    """Bytes that other schedules than 1F1B hold beside the layers' activations in flight.

    With GPipe the last stage has the logits of all micro-batches. With zero bubble a stage has what
    late weight gradients need, and the last one the gradients of the logits for them. `kept`:
    elements per token that a layer keeps.
    """
    is_last, m = stage == columns.pp - 1, columns.num_microbatches
    found = np.zeros(())
    if (is_gpipe := columns.schedule == _GPIPE).any():
        logits = (m - 1.0) * _kept_by_head(columns, model, storage)
        found = found + np.where(is_gpipe & is_last, logits, 0.0)
    if columns.splits_backward.any():
        late = layers.mean(lambda shape: late_elements(columns, shape))
        of_output = model.vocab_size / columns.tp_ranks + model.hidden_size
        of_output = (1 + model.num_mtp_layers) * of_output
        # With full recomputation the peak comes later, when the last micro-batch's have been added;
        # with latents or lone sublayers too, for which alone it was measured.
        is_measured = model.kv_lora_rank > 0 or len(layers.behind) > 0
        ended = np.minimum(stage, m - 1.0) + (is_measured | (columns.recompute == _FULL))
        elements = _beside_late_gradients(columns, stage, layers.number, kept, late)
        elements = elements + np.where(is_last, ended * of_output, 0.0)
        is_late = columns.schedule == _ZERO_BUBBLE
        if own is not None:
            is_v = columns.is_v_shaped & own.is_own
            # The products of the output's weight gradients wait for one micro-batch at most.
            of_v = late * own.late(stage) + np.where(stage == columns.last_rank, of_output, 0.0)
            elements, is_late = np.where(is_v, of_v, elements), is_late | is_v
        token_bytes = element_bytes(columns) * held_tokens(columns, model)
        found = found + np.where(is_late, token_bytes * elements, 0.0)
    return np.asarray(found, dtype=np.float64)


def _beside_late_gradients(
    columns: LayoutColumns, stage: NDArray[Any], layers: Floats, kept: Floats, late: Floats
) -> Floats:
    """Elements per token that late weight gradients add to the activations in flight.

    With `kept` elements a layer of a micro-batch in flight, and `late` ones of a micro-batch whose
    weight gradients are still to be computed. From the tables of `schedules`: the latter are as
    many as there are earlier stages, and one more when a backward pass has just ended. The layer
    that the pass has recomputed then counts in `backward_elements`.
    """
    m, later = columns.num_microbatches, columns.pp - 1.0 - stage
    most = np.minimum(m, later + 1.0)
    ended = np.minimum(m, stage + 1.0)
    others = np.minimum(m - ended, later)
    before = layers * late * np.minimum(stage, m - most)
    after = layers * (late * ended - kept * (most - others))
    after = after - np.where(columns.recompute == _FULL, late, 0.0)
    return np.asarray(np.maximum(before, after), dtype=np.float64)

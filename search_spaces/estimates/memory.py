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
from typing import Final

import numpy as np

from search_spaces.columns import LayoutColumns
from search_spaces.estimates.memory_parts import Floats, StageParts, stage_parts
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


_CHUNK: Final = 4096
"""Layouts at once: what a term makes on the way then stays in the processor's cache."""


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


MEMORY_TERMS: Final = (
    "states",
    "sharded_states",
    "activations",
    "gathered",
    "passing",
    "workspace",
)
"""What a peak is the sum of: weights and gradients, which each replica holds; the optimizer's states;
what is kept for the backward pass; gathered inputs that are kept beside; what passes (the larger of a
layer's backward pass and of the logits); and the workspace."""

NUM_MEMORY_FACTORS: Final = len(MEMORY_TERMS) + 1
"""What may be off by a factor: each of the terms, and their sum."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MemoryTerms:
    """What the peaks of many layouts, or of many stages, are sums of."""

    num_bytes: Floats
    """Expected bytes of each of `MEMORY_TERMS`, of the first stage and of the last; shape
    [2, number of terms, layouts]."""
    deviation_bytes: Floats
    """One standard deviation of each term, and the last one of all alike, as far as the trainer's
    storage is known; shape [2, number of terms + 1, layouts]."""
    scatter_bytes: Floats
    """One standard deviation of what a layout has for itself; shape [2, layouts]."""


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
    first = stage_parts(columns, model, np.zeros_like(columns.pp), storage).total
    last = stage_parts(columns, model, columns.pp - 1, storage).total
    return np.maximum(first, last)


def memory_terms(
    layouts: Layout | LayoutColumns,
    model: ModelShape,
    storage: TrainerStorage = EMBEDDED_TRAINER,
) -> MemoryTerms:
    """What the peaks of the first and of the last stage are the sums of, for many layouts.

    Columns are taken as broadcast against each other, and flattened.
    """
    columns = LayoutColumns.of(layouts).flattened()
    terms = _no_terms(2, columns.tp.size)
    for start in range(0, columns.tp.size, _CHUNK):
        rows = slice(start, start + _CHUNK)
        part = columns.rows(rows)
        for end, stage in enumerate((np.zeros_like(part.pp), part.pp - 1)):
            _fill(terms, end, rows, stage_parts(part, model, stage, storage))
    return terms


def stage_terms(
    layout: Layout, model: ModelShape, storage: TrainerStorage = EMBEDDED_TRAINER
) -> MemoryTerms:
    """The same of every stage of one layout, with the stages in place of layouts."""
    terms = _no_terms(1, layout.pp)
    parts = stage_parts(LayoutColumns.of(layout), model, np.arange(layout.pp), storage)
    _fill(terms, 0, slice(None), parts)
    return terms


def _no_terms(num_ends: int, num_layouts: int) -> MemoryTerms:
    return MemoryTerms(
        num_bytes=np.empty((num_ends, len(MEMORY_TERMS), num_layouts)),
        deviation_bytes=np.empty((num_ends, NUM_MEMORY_FACTORS, num_layouts)),
        scatter_bytes=np.empty((num_ends, num_layouts)),
    )


def _fill(terms: MemoryTerms, end: int, rows: slice, parts: StageParts) -> None:
    """Writes the terms of some layouts, and their deviations."""
    num_bytes, deviations = terms.num_bytes[end, :, rows], terms.deviation_bytes[end, :, rows]
    for term, values in enumerate(parts.terms):
        num_bytes[term] = values
    spread = parts.storage.spread
    relative = (spread.states, spread.sharded_states, spread.activations, 0.0, spread.passing)
    np.multiply(num_bytes[:5], np.array(relative)[:, None], out=deviations[:5])
    deviations[3] = parts.gathered * spread.gathered_share
    deviations[5] = spread.workspace_bytes
    np.multiply(num_bytes.sum(axis=0), spread.whole, out=deviations[6])
    terms.scatter_bytes[end, rows] = parts.gathered * spread.gathered_scatter


def stage_memory(
    layout: Layout, model: ModelShape, storage: TrainerStorage = EMBEDDED_TRAINER
) -> list[StageMemory]:
    """Estimated memory of each pipeline stage, first stage first."""
    columns = LayoutColumns.of(layout)
    stages = []
    for stage in range(layout.pp):
        parts = stage_parts(columns, model, np.asarray(stage), storage)
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
            )
        )
    return stages

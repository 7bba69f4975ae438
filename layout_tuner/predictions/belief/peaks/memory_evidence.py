"""Measured and censored peaks as rows of a regression."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Self

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.belief.job_knobs.knob_memory import (
    NO_KNOB_MEMORY,
    KnobMemory,
    deviation_bytes,
)
from layout_tuner.predictions.belief.known_measurements import Sample
from layout_tuner.predictions.belief.observation import ObservationState
from layout_tuner.predictions.estimates.peak_memory import (
    NUM_MEMORY_FACTORS,
    memory_terms,
    stage_terms,
)
from layout_tuner.predictions.estimates.trainer_storage import TrainerStorage, storage_of
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape

MEASURED: Final = 0
RAN: Final = 1
OUT_OF_MEMORY: Final = 2
FAILED: Final = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePeak:
    """The measured peak of one stage's ranks; measurements without stages have only the largest."""

    model: ModelShape
    cluster: Cluster
    layout: Layout
    stage: int
    """Position in the pipeline, from 0."""
    peak_memory_bytes: int
    """Peak of the stage's fullest rank."""
    state: ObservationState = "completed"
    """A stage that has a peak ran."""
    software: str = ""


PeakSample = Sample | StagePeak
"""A sample for the calibration of memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleGroup:
    """Samples whose factors share a part of their deviations."""

    level: int
    """Place among `LEVEL_SHARES`."""
    key: tuple[object, ...] = ()
    """The values that the samples share."""


LEVEL_SHARES: Final = (0.4, 0.3, 0.2, 0.1)
"""Shares of the levels in a factor's prior variance: all samples, the software on the cluster, the
model there, the campaign."""


def groups_of(
    *, cluster: str, software: str, model: ModelShape, campaign: str
) -> tuple[SampleGroup, ...]:
    """The groups of a sample or of a prediction: one per level."""
    trainer = (cluster, software)
    return (
        SampleGroup(level=0),
        SampleGroup(level=1, key=trainer),
        SampleGroup(level=2, key=(*trainer, model)),
        SampleGroup(level=3, key=(*trainer, model, campaign)),
    )


def usable_bytes(capacity_bytes: float, storage: TrainerStorage) -> float:
    """The largest peak that fits into a device, beside fragmentation and the context."""
    left = max(capacity_bytes - storage.context_bytes, 0.5 * capacity_bytes)
    return left / (1.0 + storage.reserved_share)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evidence:
    """Rows of a regression on ratios: a peak over its measurement, or over the device's memory."""

    expected: Floats = field(default_factory=lambda: np.empty((0, 2)))
    """The ratio by the prior mean; shape [samples, stages]."""
    weights: Floats = field(default_factory=lambda: np.empty((0, 2, NUM_MEMORY_FACTORS)))
    """The effect of one standard deviation of a factor; shape [samples, stages, factors]."""
    kinds: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """How each sample ended."""
    noises: Floats = field(default_factory=lambda: np.empty((0, 2)))
    """Prior standard deviation of each ratio around the sum; shape [samples, stages]."""
    groups: tuple[tuple[SampleGroup, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.groups)

    @classmethod
    def nothing(cls, num_factors: int) -> Self:
        """No sample, of a regression with so many factors."""
        return cls(weights=np.empty((0, 2, num_factors)))

    @property
    def num_factors(self) -> int:
        return int(self.weights.shape[-1])

    def with_more(self, more: Self) -> Self:
        """The rows of both."""
        return type(self)(
            expected=np.concatenate([self.expected, more.expected]),
            weights=np.concatenate([self.weights, more.weights]),
            kinds=np.concatenate([self.kinds, more.kinds]),
            noises=np.concatenate([self.noises, more.noises]),
            groups=self.groups + more.groups,
        )


def evidence_of(
    samples: Iterable[PeakSample],
    campaign: str,
    storages: Mapping[str, TrainerStorage] = MappingProxyType({}),
    knobs: KnobMemory = NO_KNOB_MEMORY,
) -> Evidence:
    """The rows of a campaign's samples, without those that have no information about memory.

    `storages`: by software, what it is taken to store, where that differs from `storage_of`.
    """
    by_trainer: dict[tuple[ModelShape, TrainerStorage], list[PeakSample]] = {}
    for sample in samples:
        software = sample.software
        storage = storages.get(software) or storage_of(software, sample.cluster)
        if not (sample.state == "failed" and storage.tells_out_of_memory):
            by_trainer.setdefault((sample.model, storage), []).append(sample)
    evidence = Evidence.nothing(knobs.num_factors)
    for (model, storage), alike in by_trainer.items():
        evidence = evidence.with_more(_rows(alike, model, storage, campaign, knobs))
    return evidence


def _rows(
    samples: Sequence[PeakSample],
    model: ModelShape,
    storage: TrainerStorage,
    campaign: str,
    knobs: KnobMemory,
) -> Evidence:
    named: dict[tuple[str, str], tuple[SampleGroup, ...]] = {}
    scales = np.array([known_bytes(sample, storage) for sample in samples])
    columns = LayoutColumns.of_each(sample.layout for sample in samples)
    software = [sample.software for sample in samples]
    terms = knobs.applied(memory_terms(columns, model, storage), columns, model, software)
    expected, num_knobs = terms.num_bytes.sum(axis=1), len(knobs.values)
    weights, scatter = deviation_bytes(terms, num_knobs), terms.scatter_bytes
    for row, sample in enumerate(samples):
        if isinstance(sample, StagePeak):
            own = LayoutColumns.of(sample.layout).flattened()
            of_stages = stage_terms(sample.layout, model, storage)
            of_stages = knobs.applied(of_stages, own, model, (sample.software,))
            expected[:, row] = of_stages.num_bytes[0, :, sample.stage].sum()
            weights[:, :, row] = deviation_bytes(of_stages, num_knobs)[0, :, sample.stage]
            scatter[:, row] = of_stages.scatter_bytes[0, sample.stage]
    return Evidence(
        expected=(expected / scales).T,
        weights=np.moveaxis(weights / scales, 2, 0),
        kinds=np.array([kind_of(sample) for sample in samples]),
        noises=np.hypot(scatter / scales, storage.spread.noise).T,
        groups=tuple(
            named.setdefault(
                (sample.cluster.name, sample.software),
                groups_of(
                    cluster=sample.cluster.name,
                    software=sample.software,
                    model=model,
                    campaign=campaign,
                ),
            )
            for sample in samples
        ),
    )


def kind_of(sample: PeakSample) -> int:
    """How a sample ended, among `MEASURED` to `FAILED`."""
    if sample.state == "completed":
        return RAN if sample.peak_memory_bytes is None else MEASURED
    return OUT_OF_MEMORY if sample.state == "infeasible" else FAILED


def known_bytes(sample: PeakSample, storage: TrainerStorage) -> float:
    """The measured peak; where there is none, the bound on it, which is the usable memory."""
    if sample.state == "completed" and sample.peak_memory_bytes is not None:
        return float(sample.peak_memory_bytes)
    return usable_bytes(float(sample.cluster.device_memory_bytes), storage)

"""Measured step times as arrays, with the terms of their predictions and their origins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.belief.job_knobs.knob_step_time import (
    KnobFactors,
    KnobSettings,
    KnobValue,
)
from layout_tuner.predictions.belief.known_measurements import Sample
from layout_tuner.predictions.estimates.step_time import TERM_NAMES, TimeTerms, time_terms
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The origin of a measurement, which other measurements may share."""

    cluster: str
    software: str
    model: ModelShape
    num_devices: int
    campaign: str

    def doublings_from(self, other: Origin) -> tuple[float, float]:
        """Doublings between the two, up or down: of the parameters, and of the devices."""
        parameters = np.log2(self.model.num_parameters / other.model.num_parameters)
        devices = np.log2(self.num_devices / other.num_devices)
        return abs(float(parameters)), abs(float(devices))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TimeEvidence:
    """Measured step times."""

    terms: TimeTerms
    """The terms of their predictions, one row per measurement."""
    log_s: Floats
    """Logarithms of the measured seconds."""
    origins: tuple[Origin, ...] = ()
    """Every origin that occurs."""
    origin_of: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Each measurement's place among them."""
    columns: LayoutColumns

    def __len__(self) -> int:
        return self.log_s.size

    @property
    def knob_values(self) -> Iterator[KnobValue]:
        """The values of job knobs that were measured; some occur more than once."""
        for software, settings in self._jobs[0]:
            yield from KnobValue.of(software, settings)

    def settings(self, knobs: KnobFactors) -> KnobSettings | None:
        """The settings of the measurements; None: no knob has a factor."""
        if not len(knobs):
            return None
        jobs, job = self._jobs
        design = [knobs.design(software, [settings])[0] for software, settings in jobs]
        return KnobSettings(knobs=knobs, design=np.array(design), job=job)

    @property
    def _jobs(self) -> tuple[list[tuple[str, JobSettings]], Ints]:
        """The distinct trainers with settings, and each measurement's place among them."""
        every = self.columns.jobs
        job = np.broadcast_to(self.columns.job, self.log_s.shape)
        codes, places = np.unique(self.origin_of * len(every) + job, return_inverse=True)
        origins, jobs = np.divmod(codes, len(every))
        found = [
            (self.origins[origin].software, every[at])
            for origin, at in zip(origins.tolist(), jobs.tolist(), strict=True)
        ]
        return found, places.reshape(-1)


def evidence_of(samples: Iterable[Sample], campaign: str) -> TimeEvidence:
    """The completed samples among some samples of one campaign."""
    # By identity: descriptions that are the same object are the same, and comparing costs more
    # than predicting twice.
    groups: dict[tuple[int, int, int, str], list[Sample]] = {}
    for sample in samples:
        if sample.step_time_s is not None:
            devices = sample.layout.num_devices
            key = (id(sample.model), id(sample.cluster), devices, sample.software)
            groups.setdefault(key, []).append(sample)
    return joined([_group_evidence(group, campaign) for group in groups.values()])


def _group_evidence(samples: Sequence[Sample], campaign: str) -> TimeEvidence:
    first = samples[0]
    columns = LayoutColumns.of_each(sample.layout for sample in samples)
    origin = Origin(
        cluster=first.cluster.name,
        software=first.software,
        model=first.model,
        num_devices=first.layout.num_devices,
        campaign=campaign,
    )
    return TimeEvidence(
        terms=time_terms(
            columns,
            first.model,
            first.cluster,
            kernels=kernels_of(first.software, first.cluster),
        ),
        log_s=np.log([sample.step_time_s or 1.0 for sample in samples]),
        origins=(origin,),
        origin_of=np.zeros(len(samples), dtype=np.int64),
        columns=columns,
    )


def joined(parts: Sequence[TimeEvidence]) -> TimeEvidence:
    """The measurements of several parts together."""
    origins = tuple(dict.fromkeys(origin for part in parts for origin in part.origins))
    places = {origin: place for place, origin in enumerate(origins)}
    if not parts:
        return nothing()
    moved = [
        np.array([places[o] for o in part.origins], dtype=np.int64)[part.origin_of]
        for part in parts
    ]
    return TimeEvidence(
        terms=TimeTerms.joined([part.terms for part in parts]),
        log_s=np.concatenate([part.log_s for part in parts]),
        origins=origins,
        origin_of=np.concatenate(moved),
        columns=LayoutColumns.joined([part.columns for part in parts]),
    )


def nothing() -> TimeEvidence:
    empty = np.zeros(0)
    return TimeEvidence(
        terms=TimeTerms(
            names=TERM_NAMES, seconds=np.zeros((0, len(TERM_NAMES))), backward_share=empty
        ),
        log_s=empty,
        columns=LayoutColumns.of_each([]),
    )

"""Measured step times as arrays, with the terms of their predictions and their origins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.belief.known_measurements import Sample
from layout_tuner.predictions.estimates.step_time import TERM_NAMES, TimeTerms, time_terms
from layout_tuner.predictions.estimates.storage import score_traffic_of
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS
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
            score_traffic=score_traffic_of(first.software, first.cluster),
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
        columns=LayoutColumns(
            **{
                name: np.concatenate([getattr(part.columns, name) for part in parts])
                for name in LAYOUT_FIELDS
            }
        ),
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

"""Memory and time of layouts, calibrated on what was measured elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from search_spaces.cluster import Cluster
from search_spaces.columns import LayoutColumns
from search_spaces.estimates.memory import StageMemory, stage_memory
from search_spaces.estimates.time import PRIOR, TimePart, step_time_parts
from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape
from tuner.calibration.memory import ELSEWHERE, MemoryBelief
from tuner.calibration.memory_evidence import Evidence, evidence_of
from tuner.calibration.time import TimeCalibration
from tuner.knowledge import Knowledge

Floats = NDArray[np.float64]

_NORMAL_95 = 1.96


@dataclass(frozen=True, kw_only=True, slots=True)
class StageEstimate:
    """One pipeline stage of a layout."""

    memory: StageMemory
    """Its parts, as the closed form has them."""
    peak_bytes: float
    """What is expected of its fullest rank, calibrated."""
    deviation_bytes: float
    """One standard deviation of that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutEstimate:
    """What is believed of one layout."""

    stages: tuple[StageEstimate, ...]
    """Its memory, first stage first."""
    peak_bytes: float
    """The fullest stage's peak."""
    deviation_bytes: float
    """One standard deviation of that."""
    fits: float
    """Probability that it fits into a device of the cluster."""
    step_time_s: float
    """Expected seconds a step."""
    step_time_low_s: float
    """With 95 % probability it is no less, ..."""
    step_time_high_s: float
    """... and no more."""
    time_parts: tuple[TimePart, ...]
    """What the step is made of; the parts add up to it."""


@dataclass(frozen=True)
class Calibration:
    """Measurements, and what they teach of time and memory, whatever is asked."""

    knowledge: Knowledge = field(default_factory=Knowledge)
    """Measurements that calibrate the estimates."""

    @cached_property
    def time(self) -> TimeCalibration:
        """What they teach of time."""
        return TimeCalibration.fit(self.knowledge)

    def memory(self, cluster: Cluster, software: str) -> MemoryBelief:
        """What they teach of memory there."""
        return replace(MemoryBelief.prior(cluster, software=software), evidence=self._peaks)

    @cached_property
    def _peaks(self) -> Evidence:
        return evidence_of(self.knowledge, ELSEWHERE)


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Estimates for one model on one cluster, under one software."""

    model: ModelShape
    """What is trained."""
    cluster: Cluster
    """Where."""
    software: str = ""
    """By what; empty: this project's own trainer."""
    calibration: Calibration = field(default_factory=Calibration)
    """What is known beforehand."""

    @property
    def knowledge(self) -> Knowledge:
        """Measurements that calibrate the estimates."""
        return self.calibration.knowledge

    def peaks(self, columns: LayoutColumns) -> tuple[Floats, Floats, Floats]:
        """Mean and standard deviation of the peak of each layout, and how probably it fits."""
        mean, deviation = self._memory.peak_bytes(columns, self.model)
        capacity = self.cluster.device_memory_bytes
        return mean, deviation, self._memory.fits(columns, self.model, capacity)

    def step_times(self, columns: LayoutColumns) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm of each layout's seconds a step."""
        return self._time.predict(columns, self.model, self.cluster, software=self.software)

    def layout(self, layout: Layout) -> LayoutEstimate:
        """Everything about one layout."""
        columns = LayoutColumns.of(layout)
        (peak,), (deviation,), (fits,) = self.peaks(columns)
        (log_mean,), (log_sd,) = self.step_times(columns)
        return LayoutEstimate(
            stages=tuple(self._stages(layout)),
            peak_bytes=float(peak),
            deviation_bytes=float(deviation),
            fits=float(fits),
            step_time_s=float(np.exp(log_mean)),
            step_time_low_s=float(np.exp(log_mean - _NORMAL_95 * log_sd)),
            step_time_high_s=float(np.exp(log_mean + _NORMAL_95 * log_sd)),
            time_parts=tuple(self._parts(layout, float(np.exp(log_mean)))),
        )

    def warnings(self, layouts: Layout | LayoutColumns) -> Iterator[str]:
        """Where layouts lie outside of what the estimates were calibrated on."""
        if not len(self.knowledge):
            source = self.cluster.source or "of unknown origin"
            yield f"calibrated on nothing: the constants are those of the cluster ({source})"
            return
        clusters = sorted({each.cluster.name for each in self.knowledge})
        if self.cluster.name not in clusters:
            yield f"not calibrated on cluster {self.cluster.name}, but on {', '.join(clusters)}"
        if not any(each.software == self.software for each in self.knowledge):
            yield "not calibrated on what runs here, but on other software"
        if not any(each.model == self.model for each in self.knowledge):
            known = sorted({each.model.name for each in self.knowledge})[:5]
            yield f"not calibrated on model {self.model.name}, but on {', '.join(known)}"
        if not any(each.peak_memory_bytes for each in self.knowledge):
            yield "no peak of memory is among what calibrates: only what ran and what did not"
        here = (self.cluster.name, self.software)
        if any((each.cluster.name, each.software) == here for each in self.knowledge):
            outside = self._time.outside(layouts, self.model, self.cluster, software=self.software)
            if outside is not None:
                yield outside

    @cached_property
    def _memory(self) -> MemoryBelief:
        return self.calibration.memory(self.cluster, self.software)

    @property
    def _time(self) -> TimeCalibration:
        return self.calibration.time

    def _stages(self, layout: Layout) -> Iterator[StageEstimate]:
        means, deviations = self._memory.stage_peak_bytes(layout, self.model)
        parts = stage_memory(layout, self.model, self._memory.storage)
        for memory, mean, deviation in zip(parts, means, deviations, strict=True):
            yield StageEstimate(
                memory=memory, peak_bytes=float(mean), deviation_bytes=float(deviation)
            )

    def _parts(self, layout: Layout, total_s: float) -> Iterator[TimePart]:
        """The parts under the calibrated factors; what misfits them all is shared out over them."""
        deviations, _ = self._time.deviations(
            self.model, self.cluster, num_devices=layout.num_devices, software=self.software
        )
        factors = PRIOR * np.exp(deviations[:-1])
        parts = step_time_parts(layout, self.model, self.cluster, factors)
        scale = total_s / sum(part.seconds for part in parts)
        for part in parts:
            yield TimePart(name=part.name, meaning=part.meaning, seconds=part.seconds * scale)

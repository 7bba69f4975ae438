"""Memory and time of one layout or of a table's layouts, calibrated on other measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from search_spaces.belief.factor_regression import term_factors
from search_spaces.belief.job import JobEstimate, estimate_job, predicted_step
from search_spaces.belief.known_measurements import Knowledge
from search_spaces.belief.memory import ELSEWHERE, MemoryBelief
from search_spaces.belief.memory_evidence import Evidence, evidence_of
from search_spaces.belief.time import TimeCalibration
from search_spaces.estimates.memory import StageMemory, stage_memory
from search_spaces.estimates.time import TimePart, step_time_parts
from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout import Layout
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.model_shape import ModelShape
from search_spaces.statistics.job_duration import StepInterval, TrainingJob
from search_spaces.tables import MeasurementTable, TableCell

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageEstimate:
    """One pipeline stage of a layout."""

    memory: StageMemory
    """Its parts by the closed form."""
    peak_bytes: float
    """Expected peak of its fullest rank, calibrated."""
    deviation_bytes: float
    """One standard deviation of that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutEstimate:
    """The calibrated estimate of one layout."""

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
    """Lower end of the 95 % interval."""
    step_time_high_s: float
    """Upper end of the 95 % interval."""
    time_parts: tuple[TimePart, ...]
    """The parts of the step; they add up to it."""


@dataclass(frozen=True)
class Calibration:
    """Measurements, and the calibrations of time and memory that follow from them."""

    knowledge: Knowledge = field(default_factory=Knowledge)
    """Measurements that calibrate the estimates."""

    @cached_property
    def time(self) -> TimeCalibration:
        """The calibration of step times."""
        return TimeCalibration.fit(self.knowledge)

    def memory(self, cluster: Cluster, software: str) -> MemoryBelief:
        """The calibration of memory for a cluster and a software."""
        return replace(MemoryBelief.prior(cluster, software=software), evidence=self._peaks)

    @cached_property
    def _peaks(self) -> Evidence:
        return evidence_of(self.knowledge, ELSEWHERE)


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Estimates for one model on one cluster under one software."""

    model: ModelShape
    """The model to train."""
    cluster: Cluster
    """The cluster to train on."""
    software: str = ""
    """The training software; empty: the embedded trainer."""
    calibration: Calibration = field(default_factory=Calibration)
    """The measurements to calibrate on."""

    @property
    def knowledge(self) -> Knowledge:
        """Measurements that calibrate the estimates."""
        return self.calibration.knowledge

    def peaks(self, columns: LayoutColumns) -> tuple[Floats, Floats, Floats]:
        """Mean and standard deviation of each layout's peak, and its probability of fitting."""
        mean, deviation = self._memory.peak_bytes(columns, self.model)
        capacity = self.cluster.device_memory_bytes
        return mean, deviation, self._memory.fits(columns, self.model, capacity)

    def step_times(self, columns: LayoutColumns) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm of each layout's seconds a step."""
        return self._time.predict(columns, self.model, self.cluster, software=self.software)

    def layout(self, layout: Layout) -> LayoutEstimate:
        """All estimates of one layout."""
        columns = LayoutColumns.of(layout)
        (peak,), (deviation,), (fits,) = self.peaks(columns)
        step = self._step(layout)
        return LayoutEstimate(
            stages=tuple(self._stages(layout)),
            peak_bytes=float(peak),
            deviation_bytes=float(deviation),
            fits=float(fits),
            step_time_s=step.expected_s,
            step_time_low_s=step.low_s,
            step_time_high_s=step.high_s,
            time_parts=tuple(self._parts(layout, step.expected_s)),
        )

    def job(self, job: TrainingJob, layout: Layout) -> JobEstimate:
        """The training job with one layout, at the predicted step time on the job's nodes."""
        return estimate_job(job, layout, self.model, self.cluster, self._step)

    def _step(self, layout: Layout) -> StepInterval:
        (log_mean,), (log_sd,) = self.step_times(LayoutColumns.of(layout))
        return predicted_step(log_mean, log_sd)

    def warnings(self, layouts: Layout | LayoutColumns) -> Iterator[str]:
        """In which respects the layouts lie outside of the calibration."""
        if not len(self.knowledge):
            source = self.cluster.source or "of unknown origin"
            yield f"not calibrated: the constants are those of the cluster ({source})"
            return
        clusters = sorted({each.cluster.name for each in self.knowledge})
        if self.cluster.name not in clusters:
            yield f"not calibrated on cluster {self.cluster.name}, but on {', '.join(clusters)}"
        if not any(each.software == self.software for each in self.knowledge):
            yield "not calibrated on this software, but on other software"
        if not any(each.model == self.model for each in self.knowledge):
            known = sorted({each.model.name for each in self.knowledge})[:5]
            yield f"not calibrated on model {self.model.name}, but on {', '.join(known)}"
        if not any(each.peak_memory_bytes for each in self.knowledge):
            yield "no measured peak of memory is used: only which layouts ran and which did not"
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
        """The parts under the calibrated factors, scaled so that they add up to the step time."""
        factors = self._time.factors(
            self.model, self.cluster, num_devices=layout.num_devices, software=self.software
        )
        parts = step_time_parts(layout, self.model, self.cluster, term_factors(factors.mean))
        scale = total_s / sum(part.seconds for part in parts)
        for part in parts:
            yield TimePart(name=part.name, meaning=part.meaning, seconds=part.seconds * scale)


PREDICTED_COLUMNS: Final = (
    "predicted_step_time_s",
    "predicted_peak_memory_bytes",
    "predicted_fits",
)
"""Seconds a step, bytes of the fullest device's peak, and the probability that it fits."""


def with_predictions(
    table: MeasurementTable,
    calibration: Calibration,
    *,
    say: Callable[[str], None] = lambda _: None,
) -> MeasurementTable:
    """The table with `PREDICTED_COLUMNS` added; its own measurements are not used.

    Args:
        table: the rows to predict.
        calibration: what is known.
        say: called with the progress, in words.
    """
    cells = []
    num_done = 0
    for cell in table.cells:
        say(f"predicting: {num_done} of {len(table.rows)} rows done")
        cells.append(_predicted(cell, calibration))
        num_done += len(cell.rows)
    aside = tuple(name for name in table.aside_columns if name not in PREDICTED_COLUMNS)
    return replace(
        table,
        cells=tuple(cells),
        aside_columns=(*aside, *PREDICTED_COLUMNS),
    )


def estimator_of(cell: TableCell, calibration: Calibration) -> Estimator:
    """The estimator of a cell's model, cluster and software."""
    return Estimator(
        model=cell.model, cluster=cell.cluster, software=cell.key.software, calibration=calibration
    )


def table_warnings(table: MeasurementTable, calibration: Calibration) -> list[str]:
    """The distinct warnings of all cells of the table."""
    return list(
        dict.fromkeys(
            warning
            for cell in table.cells
            for warning in estimator_of(cell, calibration).warnings(_columns(cell))
        )
    )


def _columns(cell: TableCell) -> LayoutColumns:
    return LayoutColumns.of_each(row.layout for row in cell.rows)


def _predicted(cell: TableCell, calibration: Calibration) -> TableCell:
    columns = _columns(cell)
    estimator = estimator_of(cell, calibration)
    peaks, _, fits = estimator.peaks(columns)
    times = np.exp(estimator.step_times(columns)[0])
    rows = []
    for row, *predicted in zip(cell.rows, times, peaks, fits, strict=True):
        texts = (f"{predicted[0]:.6g}", f"{predicted[1]:.0f}", f"{predicted[2]:.4f}")
        aside = {**row.aside, **dict(zip(PREDICTED_COLUMNS, texts, strict=True))}
        rows.append(replace(row, aside=aside))
    return replace(cell, rows=tuple(rows))

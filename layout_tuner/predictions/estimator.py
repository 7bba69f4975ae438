"""Memory and time of one layout or of a table's layouts, calibrated on other measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.factor_regression import term_factors
from layout_tuner.predictions.belief.job import JobEstimate, estimate_job, predicted_step
from layout_tuner.predictions.belief.known_measurements import Knowledge
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import (
    DecidingProperty,
    TrainerMemory,
    quantiles,
)
from layout_tuner.predictions.belief.plausible_samples import PlausibleSamples, plausible_samples
from layout_tuner.predictions.estimates.links import traffic_in_words
from layout_tuner.predictions.estimates.peak_memory import stage_memory
from layout_tuner.predictions.estimates.step_time import TimePart, step_time_parts
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.predictions.statistics.job_duration import StepInterval, TrainingJob
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.tables import MeasurementTable, TableCell
from layout_tuner.search_spaces.tables.columns import PREDICTED_COLUMNS
from layout_tuner.search_spaces.throughput import Throughput


@dataclass(frozen=True)
class Calibration:
    """Measurements, and the calibrations of time and memory that follow from them."""

    knowledge: Knowledge = field(default_factory=Knowledge)

    @cached_property
    def plausible(self) -> PlausibleSamples:
        """The measurements that calibrate."""
        return plausible_samples(self.knowledge)

    @cached_property
    def time(self) -> TimeCalibration:
        return TimeCalibration.fit(self.plausible.time)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutEstimate:
    """What is predicted of one layout; nothing was run."""

    model: ModelShape
    cluster: str
    constants: str
    """Where the constants of the cluster come from."""
    levels: str
    """The largest level of the network that each axis needs, in words; empty: it has none."""
    layout: Layout
    precision: str
    num_nodes: int
    num_devices: int
    global_batch_size: int
    tokens_per_step: int
    tokens_per_s: float
    """Of all devices together."""
    tokens_per_s_per_device: float
    model_tflops_per_device: float
    hardware_tflops_per_device: float
    """Recomputation included."""
    peak_tflops_per_device: float | None
    """None: the cluster states no peak for the precision, so there is no mfu and no hfu."""
    mfu: float | None
    """Share of the peak that the model's FLOPs use."""
    hfu: float | None
    """The same with recomputation."""
    step_time_s: float
    """Predicted median."""
    step_time_low_s: float
    """Lower end of its 95 % interval."""
    step_time_high_s: float
    """Upper end of it."""
    device_memory_bytes: int
    peak_memory_bytes: float
    """Expected peak of the fullest device."""
    peak_memory_deviation_bytes: float
    """One standard deviation of it."""
    peak_memory_median_bytes: float
    """Median of the peak. Where the trainer is not known the mean may be far from it."""
    peak_memory_low_bytes: float
    """Lower end of its 80 % interval."""
    peak_memory_high_bytes: float
    """Upper end of it."""
    fits: float
    """Probability that it fits into a device."""
    fits_depend_on: DecidingProperty | None
    """The property of an unknown trainer on which it depends most whether the layout fits."""
    stages: tuple[Mapping[str, float], ...]
    """The memory of each pipeline stage by parts, as `Estimator.stages` has it."""
    time_parts: tuple[TimePart, ...]
    """The parts of the step; their seconds add up to its time."""
    calibrated_on: Mapping[str, Any]
    """Numbers of measurements that calibrated it; their models, clusters and device counts."""
    warnings: tuple[str, ...]
    """In which respects it lies outside of what is known."""
    job: TrainingJob | None
    """The training job that was described."""
    job_estimate: JobEstimate | None
    """The training job with this layout."""

    def to_mapping(self) -> dict[str, Any]:
        """Plain JSON values by name, the estimate of the job among its fields."""
        values = asdict(self)
        of_job = values.pop("job_estimate")
        if not self.levels:
            del values["levels"]
        values["job"] = None if of_job is None else values["job"] | of_job
        return values | {"model": self.model.to_mapping(), "layout": self.layout.to_mapping()}


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """Estimates for one model on one cluster under one software."""

    model: ModelShape
    cluster: Cluster
    software: str = ""
    """The training software; empty: the embedded trainer."""
    calibration: Calibration = field(default_factory=Calibration)

    def peaks(self, columns: LayoutColumns) -> tuple[Floats, Floats]:
        """10, 50 and 90 % of each layout's peak in bytes, and its probability of fitting."""
        capacity = self.cluster.device_memory_bytes
        fits = self._memory.fits(columns, self.model, capacity)
        return quantiles(self._memory.each_peak_bytes(columns, self.model)), fits

    def step_times(self, columns: LayoutColumns) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm of each layout's seconds a step."""
        time = self.calibration.time
        return time.predict(columns, self.model, self.cluster, software=self.software)

    def step(self, layout: Layout) -> StepInterval:
        """Expected seconds of a step of one layout, and their 95 % interval."""
        (log_mean,), (log_sd,) = self.step_times(LayoutColumns.of(layout))
        return predicted_step(log_mean, log_sd)

    def estimate(
        self, layout: Layout, job: TrainingJob | None = None, *, warnings: Iterable[str] = ()
    ) -> LayoutEstimate:
        """All that is predicted of one layout; `warnings` are further ones."""
        columns = LayoutColumns.of(layout)
        (peak,), (deviation,) = self._memory.peak_bytes(columns, self.model)
        ((low,), (median,), (high,)), (fits,) = self.peaks(columns)
        capacity = self.cluster.device_memory_bytes
        step = self.step(layout)
        tokens = layout.global_batch_size * self.model.seq_length
        flops = self.cluster.peak_flops_per_s.get(layout.precision)
        rate = Throughput(
            model=self.model,
            layout=layout,
            tokens_per_s=tokens / step.expected_s,
            peak_tflops_per_device=(flops or math.inf) / 1e12,
        )
        unknown = {} if flops else dict.fromkeys(("peak_tflops_per_device", "mfu", "hfu"))
        return LayoutEstimate(
            model=self.model,
            cluster=self.cluster.name,
            constants=self.cluster.source,
            levels=traffic_in_words(layout, self.cluster),
            layout=layout,
            precision=layout.precision,
            num_nodes=layout.num_nodes,
            num_devices=layout.num_devices,
            global_batch_size=layout.global_batch_size,
            tokens_per_step=tokens,
            **(rate.figures | unknown),
            step_time_s=step.expected_s,
            step_time_low_s=step.low_s,
            step_time_high_s=step.high_s,
            device_memory_bytes=capacity,
            peak_memory_bytes=float(peak),
            peak_memory_deviation_bytes=float(deviation),
            peak_memory_median_bytes=float(median),
            peak_memory_low_bytes=float(low),
            peak_memory_high_bytes=float(high),
            fits=float(fits),
            fits_depend_on=self._memory.deciding(columns, self.model, capacity),
            stages=tuple(self.stages(layout)),
            time_parts=tuple(self.time_parts(layout, step.expected_s)),
            calibrated_on=_calibrated_on(self.calibration),
            warnings=(*warnings, *self.warnings(layout)),
            job=job,
            # At the predicted step time on the job's nodes.
            job_estimate=None
            if job is None
            else estimate_job(job, layout, self.model, self.cluster, self.step),
        )

    def stages(self, layout: Layout) -> Iterator[dict[str, float]]:
        """The memory of each pipeline stage, the first one first.

        Its parts are those of the closed form; `mtp_bytes`, where the model has multi-token
        prediction, is what that adds to them. Its calibrated figures are `peak_bytes`, the expected
        peak of its fullest rank, `deviation_bytes`, one standard deviation of that, and
        `low_bytes`, `median_bytes` and `high_bytes`, its 80 % interval.
        """
        means, deviations = self._memory.stage_peak_bytes(layout, self.model)
        parts = stage_memory(layout, self.model, self._memory.storage)
        ends = quantiles(self._memory.each_stage_peak_bytes(layout, self.model))
        names = ("peak_bytes", "deviation_bytes", "low_bytes", "median_bytes", "high_bytes")
        for memory, *figures in zip(parts, means, deviations, *ends, strict=True):
            said = asdict(memory)
            if not self.model.num_mtp_layers:
                del said["mtp_bytes"]
            yield said | dict(zip(names, map(float, figures), strict=True))

    def time_parts(self, layout: Layout, total_s: float) -> Iterator[TimePart]:
        """The parts under the calibrated factors, scaled so that they add up to the step time."""
        factors = self.calibration.time.factors(
            self.model, self.cluster, num_devices=layout.num_devices, software=self.software
        )
        kernels = kernels_of(self.software, self.cluster)
        parts = step_time_parts(
            layout, self.model, self.cluster, term_factors(factors.mean), kernels
        )
        scale = total_s / sum(part.seconds for part in parts)
        for part in parts:
            yield replace(part, seconds=part.seconds * scale)

    def warnings(self, layouts: Layout | LayoutColumns) -> Iterator[str]:
        """In which respects the layouts lie outside of the calibration."""
        known = self.calibration.knowledge
        if not len(known):
            source = self.cluster.source or "of unknown origin"
            yield f"not calibrated: the constants are those of the cluster ({source})"
            return
        yield from self.calibration.plausible.warnings
        clusters = sorted({each.cluster.name for each in known})
        if self.cluster.name not in clusters:
            yield f"not calibrated on cluster {self.cluster.name}, but on {', '.join(clusters)}"
        if not any(each.software == self.software for each in known):
            yield "not calibrated on this software, but on other software"
        if not any(each.model == self.model for each in known):
            models = sorted({each.model.title for each in known})[:5]
            yield f"not calibrated on model {self.model.title}, but on {', '.join(models)}"
        if not any(each.peak_memory_bytes for each in known):
            yield "no measured peak of memory is used: only which layouts ran and which did not"
        here = (self.cluster.name, self.software)
        if any((each.cluster.name, each.software) == here for each in known):
            outside = self.calibration.time.outside(
                layouts, self.model, self.cluster, software=self.software
            )
            if outside is not None:
                yield outside

    @cached_property
    def _memory(self) -> TrainerMemory:
        prior = TrainerMemory.prior(self.cluster, software=self.software)
        return prior.updated(self.calibration.plausible.memory, elsewhere=True)


def _calibrated_on(calibration: Calibration) -> dict[str, Any]:
    known, plausible = calibration.knowledge, calibration.plausible
    return {
        "samples": len(known),
        "with_step_time": plausible.num_step_times,
        "with_peak_memory": plausible.num_peaks,
        "models": sorted({each.model.name for each in known}),
        "clusters": sorted({each.cluster.name for each in known}),
        "num_devices": sorted({each.layout.num_devices for each in known}),
    }


def with_predictions(
    table: MeasurementTable,
    calibration: Calibration,
    *,
    software: str | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[MeasurementTable, list[str]]:
    """The table with `PREDICTED_COLUMNS` added, and the distinct warnings of its cells.

    Its own measurements are not used. `software` is what would run its rows; None: what did.
    """
    cells: list[TableCell] = []
    warnings: dict[str, None] = {}
    num_done = 0
    for cell in table.cells:
        say(f"predicting: {num_done} of {len(table.rows)} rows done")
        columns = LayoutColumns.of_each(row.layout for row in cell.rows)
        estimator = Estimator(
            model=cell.model,
            cluster=cell.cluster,
            software=cell.key.software if software is None else software,
            calibration=calibration,
        )
        cells.append(_predicted(cell, columns, estimator))
        warnings |= dict.fromkeys(estimator.warnings(columns))
        num_done += len(cell.rows)
    aside = [name for name in table.aside_columns if name not in PREDICTED_COLUMNS]
    predicted = replace(table, cells=tuple(cells), aside_columns=(*aside, *PREDICTED_COLUMNS))
    return predicted, list(warnings)


def _predicted(cell: TableCell, columns: LayoutColumns, estimator: Estimator) -> TableCell:
    (_, peaks, _), fits = estimator.peaks(columns)
    times = np.exp(estimator.step_times(columns)[0])
    rows = []
    for row, *predicted in zip(cell.rows, times, peaks, fits, strict=True):
        texts = (f"{predicted[0]:.6g}", f"{predicted[1]:.0f}", f"{predicted[2]:.4f}")
        aside = {**row.aside, **dict(zip(PREDICTED_COLUMNS, texts, strict=True))}
        rows.append(replace(row, aside=aside))
    return replace(cell, rows=tuple(rows))

"""Two layouts of a campaign compared: why one is predicted to be faster, and how sure that is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import numpy as np

from layout_tuner.predictions.belief.factor_regression import slopes
from layout_tuner.predictions.belief.job_knobs.knob_step_time import NUM_STEP_FACTORS
from layout_tuner.predictions.belief.layout_predictions import LayoutPredictions
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import quantiles
from layout_tuner.predictions.belief.pipeline_stalls import PipelineStalls
from layout_tuner.predictions.belief.plan_parts.step_parts import PARTS, step_shares
from layout_tuner.predictions.belief.residual import ResidualKernel, knob_coordinates
from layout_tuner.predictions.estimates.peak_memory import stage_memory
from layout_tuner.predictions.estimates.step_time import TERM_NAMES, time_terms
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.search_spaces.layouts.layout import KNOBS, Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.objectives import Objective, objective_factors
from layout_tuner.units import NORMAL_95

UNEXPLAINED: Final = "what no part explains"
"""Errors of the closed form that are not those of a part, and the noise of measurements."""
JOB_KNOBS: Final = "job knobs"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutFigures:
    """What is predicted of one of two layouts."""

    layout_key: str
    step_time_s: float
    """Predicted median."""
    objective_value: float
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
    """Probability that it fits into a device and keeps the campaign's memory headroom."""
    stall_risk: float
    """Probability that its pipeline stalls, which no other figure has in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartDifference:
    """A part of the step in seconds, or of the fullest device's memory in bytes."""

    part: str
    first: float
    second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobChange:
    """A knob in which two layouts differ."""

    knob: str
    first: Any
    second: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class UncertainPart:
    """A source of the uncertainty of the ratio of two layouts."""

    part: str
    """A part of the step, `JOB_KNOBS` or `UNEXPLAINED`."""
    share: float
    """Its share of the variance of the ratio's logarithm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveRatio:
    """The objective of a second layout over that of a first one."""

    ratio: float
    low: float
    """Lower end of its 95 % interval, in which errors that both share cancel."""
    high: float
    """Upper end of it."""
    second_is_better: float
    """Probability that the second has the larger objective, if both fit."""
    step_s: Sequence[float]
    """Predicted medians of both steps, in seconds."""
    values: Sequence[float]
    """Both objectives."""
    variances: Mapping[str, float]
    """Variance of the ratio's logarithm, by the parts that it comes from."""

    @classmethod
    def of(cls, predictions: LayoutPredictions, first: Layout, second: Layout) -> Self:
        spec, both = predictions.spec, (first, second)
        step_s = [predictions.step(each).expected_s for each in both]
        factors = objective_factors(spec.objective, LayoutColumns.of_each(both), spec.model)
        values, variances = factors / step_s, _log_variances(predictions, first, second)
        log_ratio, log_sd = math.log(values[1] / values[0]), math.sqrt(sum(variances.values()))
        low, high = (math.exp(log_ratio + side * NORMAL_95 * log_sd) for side in (-1, 1))
        return cls(
            ratio=math.exp(log_ratio),
            low=low,
            high=high,
            second_is_better=0.5 * (1.0 + math.erf(log_ratio / log_sd / math.sqrt(2.0))),
            step_s=step_s,
            values=values.tolist(),
            variances=variances,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutComparison:
    """The difference of two layouts by prediction."""

    first: LayoutFigures
    second: LayoutFigures
    changes: tuple[KnobChange, ...]
    """The knobs in which they differ, those of the job last."""
    objective: Objective
    ratio: float
    """The objective of the second over that of the first."""
    ratio_low: float
    """Lower end of its 95 % interval, in which errors that both share cancel."""
    ratio_high: float
    """Upper end of it."""
    second_is_better: float
    """Probability that the second has the larger objective, if both fit."""
    step: tuple[PartDifference, ...]
    """Seconds of the parts of the step, the largest difference first."""
    memory: tuple[PartDifference, ...]
    """Bytes of the parts of the fullest device's memory by the closed form, which measured peaks
    have not corrected."""
    uncertain: tuple[UncertainPart, ...]
    """Where the uncertainty of the ratio comes from, the largest share first."""


def compare_layouts(
    predictions: LayoutPredictions, first: Layout, second: Layout
) -> LayoutComparison:
    """The difference of two layouts of one campaign."""
    spec, both = predictions.spec, LayoutColumns.of_each((first, second))
    found = ObjectiveRatio.of(predictions, first, second)
    means, deviations = predictions.memory.peak_bytes(both, spec.model)
    lows, medians, highs = quantiles(predictions.memory.each_peak_bytes(both, spec.model))
    fits = predictions.fits(both)
    stalls = PipelineStalls(both, spec.cluster, predictions.software).prior
    figures = [
        LayoutFigures(
            layout_key=each.key,
            step_time_s=found.step_s[at],
            objective_value=found.values[at],
            peak_memory_bytes=float(means[at]),
            peak_memory_deviation_bytes=float(deviations[at]),
            peak_memory_median_bytes=float(medians[at]),
            peak_memory_low_bytes=float(lows[at]),
            peak_memory_high_bytes=float(highs[at]),
            fits=float(fits[at]),
            stall_risk=float(stalls[at]),
        )
        for at, each in enumerate((first, second))
    ]
    whole = sum(found.variances.values())
    uncertain = (
        UncertainPart(part=part, share=variance / whole)
        for part, variance in found.variances.items()
        if variance > 0
    )
    return LayoutComparison(
        first=figures[0],
        second=figures[1],
        changes=tuple(_changes(predictions, first, second)),
        objective=spec.objective,
        ratio=found.ratio,
        ratio_low=found.low,
        ratio_high=found.high,
        second_is_better=found.second_is_better,
        step=_step(predictions, (first, second), found.step_s),
        memory=_memory(predictions, (first, second)),
        uncertain=tuple(sorted(uncertain, key=lambda each: -each.share)),
    )


def _changes(predictions: LayoutPredictions, first: Layout, second: Layout) -> Iterator[KnobChange]:
    for name in KNOBS:
        before, after = getattr(first, name), getattr(second, name)
        if before != after:
            yield KnobChange(knob=name, first=before, second=after)
    for name in sorted({*first.job, *second.job}):
        declared = predictions.known_knobs.declared(predictions.software, name)
        default = declared.default if declared else None
        before, after = (
            each.job.get(name, "default" if default is None else default)
            for each in (first, second)
        )
        if (type(before), before) != (type(after), after):
            yield KnobChange(knob=name, first=before, second=after)


def _log_variances(
    predictions: LayoutPredictions, first: Layout, second: Layout
) -> dict[str, float]:
    """The variance of the logarithm of the ratio of two steps, by the parts that it comes from.

    It is d' C d with the covariance C of the factors and the difference d of the slopes of the two
    logarithms, whose addends are those of the parts, and what `ResidualKernel` adds. On different
    numbers of devices the first layout's covariance stands for both.
    """
    spec, software, both = predictions.spec, predictions.software, (first, second)
    columns = LayoutColumns.of_each(both)
    terms = time_terms(
        columns, spec.model, spec.cluster, kernels=kernels_of(software, spec.cluster)
    )
    factors = [predictions.factors(each.num_devices) for each in both]
    pairs = [predictions.time.with_settings(each, columns, software) for each in factors]
    factors, settings = [each for each, _ in pairs], pairs[0][1]
    slopes_NF = slopes(terms, np.stack([each.mean for each in factors]), settings)  # noqa: N806
    steeper = slopes_NF[1] - slopes_NF[0]
    scale = predictions.time.spread_share(software, spec.cluster) ** 2
    variances: dict[str, float] = defaultdict(float)
    addends = steeper * (factors[0].covariance @ steeper)
    for name, addend in zip(TERM_NAMES, addends, strict=False):
        variances[PARTS.get(name, "compute")] += scale * float(addend)
    # The factor on the whole step cancels. Those of job knobs are behind it.
    if len(addends) > NUM_STEP_FACTORS:
        variances[JOB_KNOBS] += scale * float(addends[NUM_STEP_FACTORS:].sum())
    points, kernel = knob_coordinates(columns), ResidualKernel()
    between = kernel.between(points, points)
    residual = between[0, 0] + between[1, 1] - 2.0 * between[0, 1] + 2.0 * kernel.noise**2
    variances[UNEXPLAINED] = scale * float(residual)
    return variances


def _step(
    predictions: LayoutPredictions, both: tuple[Layout, Layout], step_s: Sequence[float]
) -> tuple[PartDifference, ...]:
    first, second = (
        {share.part: share.share * seconds for share in step_shares(layout, predictions)}
        for layout, seconds in zip(both, step_s, strict=True)
    )
    parts = (
        PartDifference(part=part, first=first.get(part, 0.0), second=second.get(part, 0.0))
        for part in dict.fromkeys((*first, *second))
    )
    return tuple(sorted(parts, key=lambda each: -abs(each.second - each.first)))


def _memory(
    predictions: LayoutPredictions, both: tuple[Layout, Layout]
) -> tuple[PartDifference, ...]:
    first, second = (_fullest(predictions, layout) for layout in both)
    return tuple(
        PartDifference(part=part, first=first[part], second=second[part]) for part in first
    )


def _fullest(predictions: LayoutPredictions, layout: Layout) -> dict[str, float]:
    """The memory of the fullest stage's ranks by parts, in bytes."""
    model = predictions.spec.model
    means, _ = predictions.memory.stage_peak_bytes(layout, model)
    stage = stage_memory(layout, model, predictions.memory.storage)[int(np.argmax(means))]
    return {
        "weights": stage.weights_bytes,
        "gradients": stage.gradients_bytes,
        "optimizer": stage.optimizer_bytes,
        "activations": stage.activations_bytes,
        "a layer's backward pass, or the logits": max(stage.backward_bytes, stage.head_bytes),
        "workspace": stage.workspace_bytes,
    }

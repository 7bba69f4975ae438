"""Two layouts of a campaign compared: why one is predicted to be faster, and how sure that is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from layout_tuner.predictions.belief.factor_regression import slopes
from layout_tuner.predictions.belief.layout_predictions import LayoutPredictions
from layout_tuner.predictions.belief.pipeline_stalls import PipelineStalls
from layout_tuner.predictions.belief.plan_parts.step_parts import PARTS, step_shares
from layout_tuner.predictions.belief.residual import ResidualKernel, knob_coordinates
from layout_tuner.predictions.estimates.peak_memory import stage_memory
from layout_tuner.predictions.estimates.step_time import TERM_NAMES, time_terms
from layout_tuner.predictions.estimates.storage import score_traffic_of
from layout_tuner.search_spaces.layouts.layout import KNOBS, Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.objectives import Objective, objective_factors
from layout_tuner.units import NORMAL_95

UNEXPLAINED: Final = "what no part explains"
"""Errors of the closed form that are not those of a part, and the noise of measurements."""


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
    """A part of the step, or `UNEXPLAINED`."""
    share: float
    """Its share of the variance of the ratio's logarithm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutComparison:
    """The difference of two layouts by prediction."""

    first: LayoutFigures
    second: LayoutFigures
    changes: tuple[KnobChange, ...]
    """The knobs in which they differ."""
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
    step_s = [predictions.step(each).expected_s for each in (first, second)]
    values = objective_factors(spec.objective, both, spec.model) / step_s
    means, deviations = predictions.memory.peak_bytes(both, spec.model)
    fits = predictions.fits(both)
    stalls = PipelineStalls(both, spec.cluster, predictions.software).prior
    figures = [
        LayoutFigures(
            layout_key=each.key,
            step_time_s=step_s[at],
            objective_value=float(values[at]),
            peak_memory_bytes=float(means[at]),
            peak_memory_deviation_bytes=float(deviations[at]),
            fits=float(fits[at]),
            stall_risk=float(stalls[at]),
        )
        for at, each in enumerate((first, second))
    ]
    variances = _log_variances(predictions, first, second)
    log_ratio, log_sd = math.log(values[1] / values[0]), math.sqrt(sum(variances.values()))
    low, high = (math.exp(log_ratio + side * NORMAL_95 * log_sd) for side in (-1, 1))
    uncertain = (
        UncertainPart(part=part, share=variance / log_sd**2)
        for part, variance in variances.items()
        if variance > 0
    )
    return LayoutComparison(
        first=figures[0],
        second=figures[1],
        changes=tuple(_changes(first, second)),
        objective=spec.objective,
        ratio=math.exp(log_ratio),
        ratio_low=low,
        ratio_high=high,
        second_is_better=0.5 * (1.0 + math.erf(log_ratio / log_sd / math.sqrt(2.0))),
        step=_step(predictions, (first, second), step_s),
        memory=_memory(predictions, (first, second)),
        uncertain=tuple(sorted(uncertain, key=lambda each: -each.share)),
    )


def _changes(first: Layout, second: Layout) -> Iterator[KnobChange]:
    for name in KNOBS:
        before, after = getattr(first, name), getattr(second, name)
        if before != after:
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
        columns, spec.model, spec.cluster, score_traffic=score_traffic_of(software, spec.cluster)
    )
    factors = [
        predictions.time.factors(
            spec.model, spec.cluster, num_devices=each.num_devices, software=software
        )
        for each in both
    ]
    slopes_NF = slopes(terms, np.stack([each.mean for each in factors]))  # noqa: N806
    steeper = slopes_NF[1] - slopes_NF[0]
    scale = predictions.time.spread_share(software, spec.cluster) ** 2
    variances: dict[str, float] = defaultdict(float)
    addends = steeper * (factors[0].covariance @ steeper)
    # The last factor is on the whole step, and cancels.
    for name, addend in zip(TERM_NAMES, addends[:-1], strict=True):
        variances[PARTS.get(name, "compute")] += scale * float(addend)
    points, kernel = knob_coordinates(columns), ResidualKernel()
    between = kernel.between(points, points)
    residual = between[0, 0] + between[1, 1] - 2.0 * between[0, 1] + 2.0 * kernel.noise**2
    variances[UNEXPLAINED] = scale * float(residual)
    return variances


def _step(
    predictions: LayoutPredictions, both: tuple[Layout, Layout], step_s: list[float]
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

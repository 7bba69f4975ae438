"""What each value of a job knob is expected to bring to the best job of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from layout_tuner.predictions.belief.layout_predictions import LayoutPredictions
from layout_tuner.predictions.belief.plan_parts.layout_comparison import ObjectiveRatio
from layout_tuner.search_spaces.jobs.job_choices import SearchedKnob
from layout_tuner.search_spaces.layouts.job_settings import JobSettings, JobValue
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.spaces.job_set import JobSet


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobGain:
    """A value of a knob in the best job of a plan, compared with another value of it there."""

    knob: str
    value: JobValue
    reference: JobValue
    """The value that it is compared with: the trainer's default, or the first one searched."""
    is_chosen: bool
    """Whether the best job has it."""
    step_ratio: float
    """Expected factor on the step."""
    step_ratio_low: float
    """Lower end of its 95 % interval, in which errors that both jobs share cancel."""
    step_ratio_high: float
    """Upper end of it."""
    helps: float
    """Probability that it makes the step shorter."""
    peak_memory_bytes: float
    """What it adds to the expected peak of the fullest device; below 0: it saves so much."""


def knob_gains(predictions: LayoutPredictions, jobs: JobSet, best: Layout) -> Iterator[KnobGain]:
    """The values of all searched knobs in the best job, whose other settings stay.

    Values that the best layout cannot have are left out.
    """
    for each in predictions.spec.space.job.searched:
        reference = _reference(each)
        for value in each.values:
            first, second = (_with_value(best, each, of) for of in (reference, value))
            if first == second or jobs.index_of(first) is None or jobs.index_of(second) is None:
                continue
            found = ObjectiveRatio.of(predictions, first, second)
            both = LayoutColumns.of_each((first, second))
            peaks, _ = predictions.memory.peak_bytes(both, predictions.spec.model)
            yield KnobGain(
                knob=each.knob.name,
                value=value,
                reference=reference,
                is_chosen=best == second,
                # The objectives of both jobs differ by their steps alone.
                step_ratio=1.0 / found.ratio,
                step_ratio_low=1.0 / found.high,
                step_ratio_high=1.0 / found.low,
                helps=found.second_is_better,
                peak_memory_bytes=float(peaks[1] - peaks[0]),
            )


def _reference(searched: SearchedKnob) -> JobValue:
    default = searched.knob.default
    is_tried = any(searched.knob.is_default(value) for value in searched.values)
    return default if default is not None and is_tried else searched.values[0]


def _with_value(best: Layout, searched: SearchedKnob, value: JobValue) -> Layout:
    """The best job with another value of a knob; defaults are left out of settings."""
    others = {name: of for name, of in best.job.items() if name != searched.knob.name}
    own = {} if searched.knob.is_default(value) else {searched.knob.name: value}
    return replace(best, job=JobSettings({**others, **own}))

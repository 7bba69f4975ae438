"""Probability that a layout runs: from predicted memory, and from failures of similar layouts."""

# ruff: noqa: N806 (arrays carry their shape in the name: N layouts, M failures)

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.belief.job_knobs.knob_memory import KnobMemory
from layout_tuner.predictions.belief.known_measurements import Sample
from layout_tuner.predictions.belief.observation import Observation
from layout_tuner.predictions.belief.peaks.memory_evidence import usable_bytes
from layout_tuner.predictions.belief.peaks.memory_fit import LOGISTIC_PER_NORMAL, logistic
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import (
    HypothesesTerms,
    Peaks,
    TrainerMemory,
    mixed,
)
from layout_tuner.predictions.belief.residual import similarity
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.tuner.strategies.ask_and_tell import History
from layout_tuner.tuner.strategies.search_problem import SearchProblem

_EXPLAINED: Final = 0.01
"""A failed layout with a smaller probability of fitting is taken to have run out of memory."""
_BLAMED: Final = 0.7
"""Of failures that memory does not explain, the share that the layout causes: similar layouts fail
too."""
_REACH: Final = 1.0
"""Doublings of one knob over which such a failure lowers the probability."""
_CHUNK: Final = 512
"""Layouts in one pass over all failures: the intermediate arrays fit into the cache."""
_LEAST: Final = 1e-9
_SD_PER_MEDIAN: Final = 1.4826
"""Standard deviations to a median absolute deviation, of a normal distribution."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fitting:
    """Probabilities of running, and predicted peaks, of some layouts."""

    probability: Floats
    """Probability that each layout runs and keeps the memory headroom."""
    peak_mean_bytes: Floats
    """Expected peak of each layout's fullest rank."""
    peak_sd_bytes: Floats
    """Standard deviation of that."""

    def rows(self, rows: Ints) -> Fitting:
        """The same of some of the layouts."""
        return Fitting(**{each.name: getattr(self, each.name)[rows] for each in fields(self)})

    def joined(self, other: Fitting) -> Fitting:
        """These layouts followed by the other ones."""
        both = {f.name: [getattr(each, f.name) for each in (self, other)] for f in fields(self)}
        return Fitting(**{name: np.concatenate(arrays) for name, arrays in both.items()})

    def draw_peaks(self, num_draws: int, rng: np.random.Generator) -> Floats:
        """Draws of the peaks, which share one standard normal variable in each draw."""
        off = rng.standard_normal((num_draws, 1))
        return np.asarray(np.maximum(self.peak_mean_bytes + off * self.peak_sd_bytes, 1.0))


class _Peaks:
    """Peaks as means and standard deviations in bytes, under each hypothesis about the trainer."""

    def __init__(self, parts: Sequence[tuple[float, Peaks]]) -> None:
        self._parts = parts
        self.mean, self.deviation = mixed(parts)

    def below(self, bound_bytes: float) -> Floats:
        """Probability of each peak to be below, with the logistic distribution's tails."""
        chances = [
            weight * logistic(LOGISTIC_PER_NORMAL * np.log(bound_bytes / mean) * mean / deviation)
            for weight, (mean, deviation) in self._parts
        ]
        return np.asarray(sum(chances[1:], start=chances[0]))


class FittingBelief:
    """Predicts which layouts of a problem run, given the history of its search."""

    def __init__(
        self, problem: SearchProblem, columns: LayoutColumns, points: Callable[[Ints], Floats]
    ) -> None:
        """`columns` are the layouts without settings; `points` are those of what is searched."""
        self._problem = problem
        self._points = points
        self._knobs = KnobMemory(known=problem.known_knobs)
        prior = TrainerMemory.prior(
            problem.cluster, software=problem.software, campaign=HERE, knobs=self._knobs
        )
        self._prior = prior.updated(problem.plausible.memory, elsewhere=True)
        self._terms = prior.terms(columns, problem.model)
        self._peaks_before: dict[int, float] = {}

    def predict(self, history: History, rows: Ints) -> Fitting:
        """Probabilities and peaks of some layouts after the history."""
        belief = self._prior.updated(samples_of(history, self._problem))
        peaks, usable = self._peaks(history, belief, rows), self._usable_bytes(belief)
        trust = self._trust(history, belief, rows, usable)
        return _fitting(peaks, min(usable, self._problem.allowed_memory_bytes), trust)

    def predict_layouts(self, history: History) -> Fitting:
        """The same of all layouts without their jobs' settings; failures cast no doubt on these."""
        belief = self._prior.updated(samples_of(history, self._problem))
        parts = belief.each_peak_bytes(self._terms, self._problem.model)
        peaks, usable = self._seen_peaks(history, belief, parts), self._usable_bytes(belief)
        return _fitting(peaks, min(usable, self._problem.allowed_memory_bytes), 1.0)

    def predict_jobs(self, history: History, rows: Ints) -> Fitting:
        """The same of jobs, by those of their settings that are expected to change peaks."""
        problem, jobs = self._problem, self._problem.jobs
        assert jobs is not None, "job knobs are searched"
        distinct, place_of = self._knobs.expected(problem.software, jobs.settings)
        places = place_of[jobs.setting_places(rows)]
        # Jobs that differ in other settings are alike.
        codes, at = np.unique(jobs.layout_rows(rows) * len(distinct) + places, return_inverse=True)
        layouts, job = np.divmod(codes, len(distinct))
        columns = replace(jobs.legal.columns(layouts), job=job, jobs=distinct)
        belief = self._prior.updated(samples_of(history, problem))
        parts = belief.each_peak_bytes(self._prior.terms(columns, problem.model), problem.model)
        peaks, usable = self._seen_peaks(history, belief, parts), self._usable_bytes(belief)
        return _fitting(peaks, min(usable, problem.allowed_memory_bytes), 1.0).rows(at)

    def _usable_bytes(self, belief: TrainerMemory) -> float:
        return usable_bytes(float(self._problem.cluster.device_memory_bytes), belief.storage)

    def _peaks(self, history: History, belief: TrainerMemory, rows: Ints) -> _Peaks:
        """Predicted peaks of some layouts."""
        model = self._problem.model
        # Copying the terms of most layouts takes longer.
        if self._problem.jobs is None and 2 * len(rows) > len(self._problem.layouts):
            parts = [
                (weight, (mean[rows], deviation[rows]))
                for weight, (mean, deviation) in belief.each_peak_bytes(self._terms, model)
            ]
        else:
            parts = belief.each_peak_bytes(self._terms_of(rows), model)
        return self._seen_peaks(history, belief, parts)

    def _terms_of(self, rows: Ints | list[int]) -> HypothesesTerms:
        jobs, problem = self._problem.jobs, self._problem
        if jobs is None:
            return _of_rows(self._terms, rows)
        return self._prior.terms(jobs.columns(np.asarray(rows, np.int64)), problem.model)

    def _seen_peaks(
        self, history: History, belief: TrainerMemory, parts: Sequence[tuple[float, Peaks]]
    ) -> _Peaks:
        """Predicted peaks, shifted and widened by the errors of the prediction so far.

        Without this, a prior that is too narrow would treat every measurement as an outlier.
        """
        model = self._problem.model
        measured = {
            row: seen.peak_memory_bytes
            for row, seen in _seen(history, model).items()
            if seen.peak_memory_bytes is not None
        }
        if not measured:
            return _Peaks(parts)
        expected = belief.each_peak_bytes(self._terms_of(list(measured)), model)
        true = np.array(list(measured.values()), dtype=np.float64)
        return _Peaks(
            [
                (weight, _corrected(peaks, true / of))
                for (weight, peaks), (_, (of, _)) in zip(parts, expected, strict=True)
            ]
        )

    def peak_bytes(self, row: int) -> float:
        """The prediction of one layout's peak before the search."""
        if row not in self._peaks_before:
            peaks, _ = self._prior.peak_bytes(self._terms_of([row]), self._problem.model)
            self._peaks_before[row] = float(peaks[0])
        return self._peaks_before[row]

    def part_peak_share(self, row: int, fidelity: Fidelity) -> float:
        """The predicted peak of a part of a layout, as a share of the layout's."""
        problem = self._problem
        if fidelity.keeps_memory(problem.model):
            return 1.0
        model = fidelity.reduced_model(problem.model)
        part = LayoutColumns.of_each([fidelity.reduced(problem.layouts.layout(row))])
        (peak,), _ = self._prior.peak_bytes(self._prior.terms(part, model), model)
        return float(peak) / self.peak_bytes(row)

    def _trust(self, history: History, belief: TrainerMemory, rows: Ints, usable: float) -> Floats:
        """A factor on each probability, below 1 near failures that memory does not explain.

        A layout that failed although it should fit has another defect, which similar layouts may
        share: a stage without layers, or a group size that a library does not support.
        """
        failed = np.array(
            [i for i, seen in history.observations.items() if seen.state != "completed"],
            dtype=np.int64,
        )
        if not len(failed):
            return np.ones(len(rows))
        unexplained_M = self._peaks(history, belief, failed).below(usable)
        # Failures that memory explains are left out: the similarity of 10^5 layouts to hundreds of
        # failures takes seconds.
        in_doubt = unexplained_M > _EXPLAINED
        failed, unexplained_M = failed[in_doubt], unexplained_M[in_doubt]
        doubt_N = np.zeros(len(rows))
        for start in range(0, len(rows), _CHUNK):
            part = slice(start, start + _CHUNK)
            alike_NM = similarity(self._points(rows[part]), self._points(failed), _REACH)
            doubt_N[part] = (alike_NM * unexplained_M).max(axis=1, initial=0.0)
        return np.asarray(1.0 - _BLAMED * doubt_N)


HERE: Final = "this campaign"


def samples_of(history: History, problem: SearchProblem) -> Sequence[Sample]:
    """The observations of a search as samples of its model and cluster."""
    return [
        Sample(
            model=problem.model,
            cluster=problem.cluster,
            layout=history.layouts.layout(index),
            state=seen.state,
            # Only memory is calibrated on these samples; the step time may be unknown.
            step_time_s=(seen.step_time_s or 1.0) if seen.state == "completed" else None,
            peak_memory_bytes=seen.peak_memory_bytes,
            software=problem.software,
        )
        for index, seen in _seen(history, problem.model).items()
    ]


def _fitting(peaks: _Peaks, bound_bytes: float, trust: Floats | float) -> Fitting:
    return Fitting(
        probability=np.maximum(peaks.below(bound_bytes) * trust, _LEAST),
        peak_mean_bytes=peaks.mean,
        peak_sd_bytes=peaks.deviation,
    )


def _corrected(peaks: Peaks, ratios: Floats) -> Peaks:
    """Peaks, shifted and widened by the ratios of measured over expected ones."""
    mean, deviation = peaks
    off = np.log(ratios)
    shift = float(np.median(off))
    spread = float(np.median(np.abs(off - shift))) * _SD_PER_MEDIAN
    mean = mean * np.exp(shift)
    return mean, np.hypot(deviation, spread * mean)


def _of_rows(terms: HypothesesTerms, rows: Ints | list[int]) -> HypothesesTerms:
    """The terms of some layouts (the last axis of each array)."""
    return [each.rows(rows) for each in terms]


def _seen(history: History, model: ModelShape) -> dict[int, Observation]:
    """Runs with the memory of their layout, by position: in full, or in part with all layers."""
    cheap = {
        row: run.observation
        for row, run in history.cheap.items()
        if run.fidelity.keeps_memory(model)
    }
    return cheap | history.observations

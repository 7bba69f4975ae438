"""What a search predicts of all layouts: estimates, corrected by what it measured."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.belief.cheap_probe_step_time import (
    COMMON_LOG_SD,
    extrapolation_log_sd,
    independent_log_sd,
    ratio_covariance,
)
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.factor_regression import (
    StepFactors,
    drawn_log_step_s,
    log_step_s,
    rows_of,
)
from layout_tuner.predictions.belief.job_knobs.knob_step_time import (
    NUM_STEP_FACTORS,
    JobRows,
    KnobFactors,
)
from layout_tuner.predictions.belief.known_residuals import known_residual
from layout_tuner.predictions.belief.pipeline_stalls import PipelineStalls
from layout_tuner.predictions.belief.residual import KnobPoints
from layout_tuner.predictions.belief.slow_runs import MEAN_EXCESS
from layout_tuner.predictions.belief.step_belief import MeasuredParts, StepBelief, StepModel, joined
from layout_tuner.predictions.belief.time_evidence import Origin
from layout_tuner.predictions.belief.time_fit import TimePrior
from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.predictions.estimates.step_time import time_terms
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity
from layout_tuner.tuner.strategies.ask_and_tell import CheapRun, History
from layout_tuner.tuner.strategies.fitting import HERE, Fitting, FittingBelief
from layout_tuner.tuner.strategies.improvement import largest
from layout_tuner.tuner.strategies.objective_values import ObjectiveValues
from layout_tuner.tuner.strategies.search_problem import SearchProblem

_SCALE_LOG_SD: Final = 0.3
"""Standard deviation of a common factor on the whole step."""
MAX_LAYOUTS: Final = 4_000
"""Layouts of which a proposal looks at what settings may bring."""
MAX_JOBS: Final = 40_000
"""Jobs of which it looks at the step."""
MOST_COMPARED: Final = 3_000
"""Jobs of which it looks at more: half by expected steps, half by what can be hoped for."""
HOPE: Final = 2.0
"""Standard deviations by which a knob may be better than expected: 2.3 % are better still."""
LEAST_LAYOUTS: Final = 200
"""Least number of layouts whose jobs it looks at."""
_DOUBT: Final = 0.05
"""Probability of a slowed run from which on a repetition is considered."""
_MOST_RUNS: Final = 4
"""Runs of one layout: more would not show what these do not."""


class LayoutPart(NamedTuple):
    """A part of a layout, as a cheap probe runs it."""

    model: StepModel
    """Its closed form."""
    extrapolation_log_sd: float
    """Standard deviation of the layout's step as extrapolated from it, in logarithms."""
    independent_log_sd: float
    """The part of that which other probes do not share."""


class LayoutMeans(NamedTuple):
    """What is expected of all layouts without the settings of their jobs."""

    fitting: Fitting
    """Whether they run."""
    log_s: Floats
    """Logarithms of their steps."""
    values: Floats
    """Their objectives; shape [layouts, objectives]."""


class Predictions:
    """Predicted step times, peaks and objectives of all layouts, given the history of a search."""

    def __init__(self, problem: SearchProblem) -> None:
        columns = problem.without_jobs.columns()
        points = KnobPoints(columns)
        self._kernels = kernels_of(problem.software, problem.cluster)
        terms = time_terms(
            columns,
            problem.model,
            problem.cluster,
            kernels=self._kernels,
            dtype=np.float32,
        )
        calibration = TimeCalibration.fit(problem.plausible.time, problem.known_knobs)
        residual = known_residual(calibration, _origin(problem), columns)
        self.jobs = problem.jobs
        """The jobs, where job knobs are searched."""
        prior = _of_either_sign(factors_prior(problem, calibration), calibration.knobs)
        prior, settings = calibration.with_settings(prior, columns, problem.software)
        of_jobs = None
        if problem.jobs is not None:
            of_jobs = JobRows(problem.jobs, calibration.knobs, problem.software)
            prior = prior.with_knobs(of_jobs.interactions)
        self._prior = prior
        self._model = StepModel(
            terms=terms,
            points=points,
            residual=residual,
            settings=settings,
            of_jobs=of_jobs,
        )
        self.fitting = FittingBelief(problem, columns, self._model.points_of)
        """Predicts which layouts run, and their peaks."""
        self.stalls = PipelineStalls(columns, problem.cluster, problem.software)
        """Predicts which layouts are far slower than the closed form says."""
        self.objectives = ObjectiveValues(problem, columns)
        self._problem = problem
        self._known_parts: dict[tuple[int, Fidelity], LayoutPart] = {}
        self._is_calibrated = bool(problem.knowledge.samples)
        self._last_belief: tuple[tuple[Any, ...], StepBelief] | None = None
        """What was measured, and the belief after it: proposal and stop ask for the same one."""

    def belief(self, history: History) -> StepBelief:
        """The prediction of step times after the measurements of the history."""
        runs = [(row, run) for row in history.observations for run in history.completed_runs(row)]
        full = [self.objectives.log_step_s(row, run) for row, run in runs]
        cheap = [run.observation.step_time_s or np.nan for run in history.cheap.values()]
        rows, log_s = [row for row, _ in runs], np.r_[full, np.log(cheap)]
        fidelities = [run.fidelity for run in history.cheap.values()]
        known = (rows, list(history.cheap), fidelities, log_s.tolist())
        if self._last_belief is None or known != self._last_belief[0]:
            parts = self._parts(np.array(rows, np.int64), history.cheap) if cheap else None
            every = np.array([*rows, *history.cheap], np.int64)
            fitted = StepBelief(self._model, self._prior, every, log_s, parts)
            self._last_belief = known, fitted
        return self._last_belief[1]

    def of_layouts(self, history: History, belief: StepBelief) -> LayoutMeans:
        """What is expected of all layouts without settings; failures cast no doubt on these."""
        rows = np.arange(len(self._problem.without_jobs))
        fitting, log_s = self.fitting.predict_layouts(history), belief.layout_mean
        values = self.objectives.values_of_layouts(rows, log_s, fitting.peak_mean_bytes)
        return LayoutMeans(fitting, log_s, values)

    def jobs_to_look_at(
        self,
        history: History,
        belief: StepBelief,
        of_all: LayoutMeans,
        figure: Callable[[Floats], Floats],
    ) -> NDArray[np.int64]:
        """The free jobs that a proposal compares, by position.

        `of_all` is of each layout without settings; `figure` makes one number of several
        objectives. The jobs are those of layouts that are worth most, or that are if each term is
        as short, and memory as small, as some settings make it; and of these jobs those that are
        worth most by their own steps and peaks.
        """
        jobs = self.jobs
        assert jobs is not None, "job knobs are searched"
        worth = figure(of_all.values) + np.log(of_all.fitting.probability)
        taken, counts = np.unique(
            jobs.layout_rows(np.array(sorted(history.taken), np.int64)), return_counts=True
        )
        worth[taken[counts == jobs.num_jobs(taken)]] = -np.inf
        rows = np.sort(largest(worth, MAX_LAYOUTS))
        rows = rows[worth[rows] > -np.inf]
        every = jobs.jobs_of(rows)
        fitting = self.fitting.predict_jobs(history, every)
        most = max(MAX_JOBS // len(jobs.settings), LEAST_LAYOUTS)
        if len(rows) > most:
            ends = np.cumsum(jobs.num_jobs(rows))
            fits = np.maximum.reduceat(fitting.probability, np.r_[0, ends[:-1]])
            shortest = self._of_settings(belief, hope=HOPE).min(axis=0)
            log_s = of_all.log_s[rows] - self._gain(belief, rows, shortest[None])[0]
            peaks = of_all.fitting.peak_mean_bytes[rows]
            hoped = figure(self.objectives.values_of_layouts(rows, log_s, peaks)) + np.log(fits)
            chosen = (largest(each, most // 2) for each in (worth[rows], hoped))
            kept = np.union1d(*chosen)
            of_row = np.repeat(np.arange(len(rows)), jobs.num_jobs(rows))
            at_kept = np.flatnonzero(np.isin(of_row, kept))
            rows, every, fitting = rows[kept], every[at_kept], fitting.rows(at_kept)
        free = np.flatnonzero(~np.isin(every, list(history.taken)))
        every, fitting = every[free], fitting.rows(free)
        layouts = jobs.layout_rows(every)
        assert self._model.of_jobs is not None, "job knobs are searched"
        at = self._model.of_jobs.places(every), np.searchsorted(rows, layouts)
        looks = []
        for hope in (0.0, HOPE):
            gain = self._gain(belief, rows, self._of_settings(belief, hope=hope))[at]
            values = self.objectives.values_of_layouts(
                layouts, of_all.log_s[layouts] - gain, fitting.peak_mean_bytes
            )
            looks.append(largest(figure(values) + np.log(fitting.probability), MOST_COMPARED // 2))
        best = every[np.union1d(*looks)]
        cheap = history.free(np.array(list(history.cheap), np.int64))
        return np.union1d(best, cheap).astype(np.int64)

    def shortest(self, history: History, belief: StepBelief) -> tuple[Ints, Floats]:
        """Free layouts and logarithms of their steps; with job knobs, a job of every layout.

        Of a job each term is as short as some settings make it.
        """
        if self.jobs is None:
            rows = history.free()
            return rows, belief.physical_mean(rows)
        shortest = self._of_settings(belief).min(axis=0)
        return self.jobs.ends - 1, log_step_s(self._model.terms, shortest) + self._model.residual

    def _gain(self, belief: StepBelief, rows: Ints, deviations: Floats) -> Floats:
        """By how much deviations shorten layouts' steps, in logarithms; [deviations, layouts]."""
        terms = rows_of(self._model.terms, rows)
        without = log_step_s(terms, belief.factors.mean)
        return np.asarray(without - drawn_log_step_s(terms, deviations))

    def _of_settings(self, belief: StepBelief, *, hope: float = 0.0) -> NDArray[np.float64]:
        """Deviations of the factors of terms and step; shape [settings, factors].

        Those of the knobs are `hope` standard deviations below their means.
        """
        assert self._model.of_jobs is not None, "job knobs are searched"
        deviations = belief.factors.mean.copy()
        spread = np.sqrt(np.maximum(np.diagonal(belief.factors.covariance), 0.0))
        deviations[NUM_STEP_FACTORS:] -= hope * spread[NUM_STEP_FACTORS:]
        return self._model.of_jobs.every.deviations(deviations)

    def ordered(
        self, history: History, belief: StepBelief, rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Some layouts, those with the largest expected objective times P(fits) first."""
        fitting = self.fitting.predict(history, rows)
        log_s = belief.physical_mean(rows)
        values = self.objectives.values(rows, log_s, fitting.peak_mean_bytes)[:, 0]
        return rows[np.argsort(-(values + np.log(fitting.probability)), kind="stable")]

    def _parts(self, rows: NDArray[np.int64], cheap: Mapping[int, CheapRun]) -> MeasuredParts:
        """The runs: layouts in full, and then parts of others."""
        parts = [self.part(row, run.fidelity) for row, run in cheap.items()]
        ran, wholes = joined([part.model for part in parts]), np.array(list(cheap), np.int64)
        errors = np.zeros((len(rows) + len(parts),) * 2)
        errors[len(rows) :, len(rows) :] = (
            np.diag(np.square([part.independent_log_sd for part in parts]))
            + ratio_covariance(ran.terms, self._model.rows(wholes).terms)
            + COMMON_LOG_SD**2
        )
        return MeasuredParts(model=joined([self._model.rows(rows), ran]), errors=errors)

    def part(self, row: int, fidelity: Fidelity) -> LayoutPart:
        if (row, fidelity) not in self._known_parts:
            problem, whole = self._problem, self._model.rows(np.array([row]))
            layout = problem.layouts.layout(row)
            terms = time_terms(
                fidelity.reduced(layout),
                fidelity.reduced_model(problem.model),
                problem.cluster,
                kernels=self._kernels,
            )
            self._known_parts[row, fidelity] = LayoutPart(
                replace(whole, terms=terms),
                extrapolation_log_sd(fidelity, layout, problem.model, terms, whole.terms),
                independent_log_sd(fidelity, layout, problem.model),
            )
        return self._known_parts[row, fidelity]

    def doubted(self, history: History, belief: StepBelief) -> dict[int, float]:
        """How likely each measured layout was slowed down, where it may be worth another run."""
        slowed: dict[int, float] = {}
        num_full = len(belief.rows) - len(history.cheap)  # those of cheap probes come last
        full = zip(belief.rows[:num_full].tolist(), belief.slowed.tolist(), strict=False)
        for row, share in full:
            if share > _DOUBT and len(history.completed_runs(row)) < _MOST_RUNS:
                slowed[row] = max(share, slowed.get(row, 0.0))
        return {row: share for row, share in slowed.items() if row not in history.pending}

    def sound(self, belief: StepBelief, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Probability that some layouts do not stall."""
        asked, measured = (self._problem.layout_rows(each) for each in (rows, belief.rows))
        return 1.0 - self.stalls.probability(asked, measured, belief.slowed)

    def of_one(
        self,
        history: History,
        belief: StepBelief,
        fitting: Fitting,
        rows: NDArray[np.int64],
        *,
        fidelity: Fidelity | None = None,
    ) -> Prediction:
        """The prediction of one layout, or a part of it, as a record; `rows` has one position."""
        peak_bytes = float(fitting.peak_mean_bytes[0])
        if fidelity is None:
            mean, deviation = belief.marginals(rows)
        else:
            row = int(rows[0])
            part = self.part(row, fidelity)
            mean, deviation = belief.marginals_of(part.model)
            peak_bytes *= self.fitting.part_peak_share(row, fidelity)
            off = (part.extrapolation_log_sd, COMMON_LOG_SD)
            deviation = np.sqrt(np.square(deviation) + np.square(off).sum())
        # The second moment of an exponential distribution is twice the square of its mean.
        stalled = MEAN_EXCESS * np.sqrt(2.0 * (1.0 - self.sound(belief, rows)))
        is_calibrated = self._is_calibrated or bool(history.observations)
        return Prediction.of(
            log_step_time=float(mean[0]),
            log_step_time_sd=float(np.hypot(deviation, stalled)[0]),
            peak_memory_bytes=peak_bytes,
            fit_probability=float(fitting.probability[0]),
            source="calibrated" if is_calibrated else "estimates",
        )


def factors_prior(problem: SearchProblem, calibration: TimeCalibration) -> StepFactors:
    """The prior of the step time's factors, calibrated on measurements from elsewhere."""
    if not len(calibration.evidence):
        return TimePrior(scale_log_sd=_SCALE_LOG_SD).factors.with_knobs(calibration.knobs)
    origin = _origin(problem)
    return calibration.factors(
        problem.model,
        problem.cluster,
        num_devices=origin.num_devices,
        software=problem.software,
        campaign=origin.campaign,
    )


def _of_either_sign(factors: StepFactors, knobs: KnobFactors) -> StepFactors:
    """The factors of knobs with a spread at least as wide as what their declarations expect.

    One published figure does not settle the sign: the same dispatcher takes 0.73 times as long for
    one model and 1.03 times for another. A search that believed it would not try such a value.
    """
    covariance = factors.covariance.copy()
    for place, expected in enumerate(knobs.mean, len(factors.mean) - len(knobs)):
        covariance[place, place] += expected**2
    return StepFactors(mean=factors.mean, covariance=covariance)


def _origin(problem: SearchProblem) -> Origin:
    """The origin of the search's own measurements."""
    return Origin(
        cluster=problem.cluster.name,
        software=problem.software,
        model=problem.model,
        num_devices=problem.layouts.layout(0).num_devices,
        campaign=HERE,
    )


def order_by_estimate(problem: SearchProblem) -> Iterable[int]:
    """Positions of the layouts, best first, by the estimates before the search's first probe.

    The order is by expected objective times the probability of fitting into memory. Equal layouts
    stay in the canonical order. With job knobs, the jobs of the best layouts (`jobs_to_look_at`)
    come first, by their own estimates, and then all others, layout by layout.
    """
    predictions = Predictions(problem)
    nothing = History(problem.layouts)
    belief = predictions.belief(nothing)
    if predictions.jobs is None:
        return predictions.ordered(nothing, belief, np.arange(len(problem.layouts)))
    of_all, jobs = predictions.of_layouts(nothing, belief), predictions.jobs
    best = predictions.jobs_to_look_at(nothing, belief, of_all, lambda values: values[..., 0])
    worth = of_all.values[:, 0] + np.log(of_all.fitting.probability)
    others = np.argsort(-worth, kind="stable")
    every = chain.from_iterable(jobs.jobs_of(np.array([row])).tolist() for row in others)
    first = set(best.tolist())
    rest = (job for job in every if job not in first)
    return chain(predictions.ordered(nothing, belief, best), rest)

"""What a search predicts of all layouts: estimates, corrected by what it measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from layout_tuner.predictions.belief.cheap_probe_step_time import (
    COMMON_LOG_SD,
    extrapolation_log_sd,
)
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.factor_regression import StepFactors
from layout_tuner.predictions.belief.known_residuals import known_residual
from layout_tuner.predictions.belief.pipeline_stalls import PipelineStalls
from layout_tuner.predictions.belief.residual import KnobPoints
from layout_tuner.predictions.belief.slow_runs import MEAN_EXCESS
from layout_tuner.predictions.belief.step_belief import MeasuredParts, StepBelief, StepModel, joined
from layout_tuner.predictions.belief.time_evidence import Origin
from layout_tuner.predictions.belief.time_fit import TimePrior
from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.predictions.estimates.step_time import time_terms
from layout_tuner.predictions.estimates.storage import score_traffic_of
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity
from layout_tuner.tuner.strategies.ask_and_tell import CheapRun, History
from layout_tuner.tuner.strategies.fitting import HERE, Fitting, FittingBelief
from layout_tuner.tuner.strategies.objective_values import ObjectiveValues
from layout_tuner.tuner.strategies.search_problem import SearchProblem

_SCALE_LOG_SD: Final = 0.3
"""Standard deviation of a common factor on the whole step."""
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


class Predictions:
    """Predicted step times, peaks and objectives of all layouts, given the history of a search."""

    def __init__(self, problem: SearchProblem) -> None:
        columns = problem.layouts.columns()
        points = KnobPoints(columns)
        self._score_traffic = score_traffic_of(problem.software, problem.cluster)
        terms = time_terms(
            columns,
            problem.model,
            problem.cluster,
            score_traffic=self._score_traffic,
            dtype=np.float32,
        )
        calibration = TimeCalibration.fit(problem.plausible.time)
        residual = known_residual(calibration, _origin(problem), columns)
        self._model = StepModel(terms=terms, points=points, residual=residual)
        self._prior = factors_prior(problem, calibration)
        self.fitting = FittingBelief(problem, columns, points)
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

    def _parts(self, rows: NDArray[np.int64], cheap: Mapping[int, CheapRun]) -> MeasuredParts:
        """The runs: layouts in full, and then parts of others."""
        parts = [self.part(row, run.fidelity) for row, run in cheap.items()]
        off = [part.extrapolation_log_sd for part in parts]
        is_cheap = np.repeat([0.0, 1.0], [len(rows), len(parts)])
        errors = np.diag(np.r_[np.zeros(len(rows)), np.square(off)])
        errors += COMMON_LOG_SD**2 * np.outer(is_cheap, is_cheap)
        models = [self._model.rows(rows), *(part.model for part in parts)]
        return MeasuredParts(model=joined(models), errors=errors)

    def part(self, row: int, fidelity: Fidelity) -> LayoutPart:
        if (row, fidelity) not in self._known_parts:
            problem, whole = self._problem, self._model.rows(np.array([row]))
            layout = problem.layouts.layout(row)
            terms = time_terms(
                fidelity.reduced(layout),
                fidelity.reduced_model(problem.model),
                problem.cluster,
                score_traffic=self._score_traffic,
            )
            self._known_parts[row, fidelity] = LayoutPart(
                replace(whole, terms=terms),
                extrapolation_log_sd(fidelity, layout, problem.model, terms, whole.terms),
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
        return 1.0 - self.stalls.probability(rows, belief.rows, belief.slowed)

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
        return TimePrior(scale_log_sd=_SCALE_LOG_SD).factors
    origin = _origin(problem)
    return calibration.factors(
        problem.model,
        problem.cluster,
        num_devices=origin.num_devices,
        software=problem.software,
        campaign=origin.campaign,
    )


def _origin(problem: SearchProblem) -> Origin:
    """The origin of the search's own measurements."""
    return Origin(
        cluster=problem.cluster.name,
        software=problem.software,
        model=problem.model,
        num_devices=problem.layouts.layout(0).num_devices,
        campaign=HERE,
    )


def order_by_estimate(problem: SearchProblem) -> NDArray[np.int64]:
    """Positions of the layouts, best first, by the estimates before the search's first probe.

    The order is by expected objective times the probability of fitting into memory. Equal layouts
    stay in the canonical order.
    """
    predictions = Predictions(problem)
    nothing = History(problem.layouts)
    rows = np.arange(len(problem.layouts))
    fitting = predictions.fitting.predict(nothing, rows)
    log_s = predictions.belief(nothing).physical_mean(rows)
    values = predictions.objectives.values(rows, log_s, fitting.peak_mean_bytes)[:, 0]
    return np.argsort(-(values + np.log(fitting.probability)), kind="stable")

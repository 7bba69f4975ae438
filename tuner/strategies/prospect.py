"""What a physics-informed strategy believes of a problem's layouts: their times, their peaks, their worth."""

from __future__ import annotations

import numpy as np

from search_spaces.estimates.time import time_terms
from tuner.problem import SearchProblem
from tuner.residual import knob_coordinates
from tuner.strategies.base import History
from tuner.strategies.factors_prior import factors_prior
from tuner.strategies.fitting import FittingBelief
from tuner.strategies.goals import Goals
from tuner.strategies.step_belief import StepBelief, StepModel


class Prospect:
    """The estimates of all layouts, made once, and the beliefs that a history turns them into."""

    def __init__(self, problem: SearchProblem) -> None:
        columns = problem.layouts.columns()
        points = knob_coordinates(columns)
        terms = time_terms(columns, problem.model, problem.cluster)
        self._model = StepModel(terms=terms, points=points)
        self._prior = factors_prior(problem)
        self.fitting = FittingBelief(problem, columns, points)
        """Which layouts run, and their peaks."""
        self.goals = Goals(problem, columns)
        """What layouts are worth."""

    def belief(self, history: History) -> StepBelief:
        """Step times after what was measured."""
        rows = np.array([row for row, _ in history.successes()], dtype=np.int64)
        log_s = [self.goals.log_step_s(row, history.observations[row]) for row in rows.tolist()]
        return StepBelief(self._model, self._prior, rows, np.array(log_s))

"""The closed form alone: layouts in the order of what is expected of them before the first probe."""

from __future__ import annotations

import numpy as np

from tuner.problem import SearchProblem
from tuner.strategies.base import History
from tuner.strategies.prospect import Prospect


class ModelOnlyProposer:
    """Learns nothing from its probes; what is known from elsewhere counts. The baseline for learning."""

    def __init__(self, problem: SearchProblem) -> None:
        prospect = Prospect(problem)
        nothing = History(problem.layouts)
        rows = np.arange(len(problem.layouts))
        belief, fitting = prospect.belief(nothing), prospect.fitting.judge(nothing, rows)
        log_s = belief.physical_mean(rows)
        values = prospect.goals.values(rows, log_s, fitting.peak_mean_bytes)[:, 0]
        # Stable: of equals the first in the canonical order.
        self._order = np.argsort(-(values + np.log(fitting.probability)), kind="stable")
        self._next = 0

    def propose(self, history: History) -> int:
        """The first of the order that is free; what is taken stays so, hence no look back."""
        while not history.is_free[self._order[self._next]]:
            self._next += 1
        return int(self._order[self._next])

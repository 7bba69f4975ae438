"""Whether the next probe runs its layout in full, or which part of it.

Only layouts that were measured in full are ranked, and one full probe of a large job costs as much
as ten cheap ones. So cheap probes explore, until the layouts that no probe has measured would
hardly improve the best; then the most promising one is measured in full. From then on a cheap probe
also has to be worth the full probe that would follow it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.belief.step_belief import StepBelief
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity, ProbeCosts, fidelities
from layout_tuner.tuner.strategies.improvement import expected_improvement
from layout_tuner.tuner.strategies.predictions import Predictions
from layout_tuner.tuner.strategies.search_problem import SearchProblem

WORTH: Final = 0.01
"""Expected gain of the next cheap probe, as a share of the best, for which they go on."""
_LAST_WORTH: Final = 0.001
"""Expected gain for which the last full probe that a budget pays for is run."""
_RESERVE: Final = 1.2
"""Expected node-seconds of a full probe, times this, that a budget keeps for one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The figures of a layout by which its fidelity is chosen."""

    row: int
    """Its position."""
    log_s: float
    """Expected logarithm of its step time."""
    log_sd: float
    """Standard deviation of that."""
    above_best: float
    """How far its expected figure is above the best, in logarithms of the objective."""
    runs: float
    """Probability that it runs."""


class CheapProbes:
    """Chooses the part of a layout that a probe runs, by gain per node-second."""

    def __init__(self, problem: SearchProblem, costs: ProbeCosts, predictions: Predictions) -> None:
        self._problem = problem
        self._costs = costs
        self._predictions = predictions

    def choose(self, belief: StepBelief, candidate: Candidate) -> tuple[Fidelity | None, float]:
        """The fidelity of the largest expected gain per node-second, and its node-seconds.

        None: the whole layout.

        A part that leaves a share of the error open gains less, and one without all layers does not
        show whether the layout fits: its failure costs a full probe later.
        """
        problem, row = self._problem, candidate.row
        layout = problem.layouts.layout(row)
        full_node_s = self.full_node_s(row, candidate.log_s)
        chosen: tuple[Fidelity | None, float]
        best, chosen = self._gain(candidate, 0.0) / full_node_s, (None, full_node_s)
        for fidelity in fidelities(layout, problem.model, problem.cluster):
            spent = node_s = self.expected_node_s(belief, row, fidelity)
            if not fidelity.keeps_memory(problem.model):
                node_s += (1.0 - candidate.runs) * full_node_s
            error = self._predictions.part(row, fidelity).extrapolation_log_sd
            rate = self._gain(candidate, error) / node_s
            if rate > best:
                best, chosen = rate, (fidelity, spent)
        return chosen

    def expected_node_s(self, belief: StepBelief, row: int, fidelity: Fidelity | None) -> float:
        """Expected node-seconds of a probe of a layout, or of a part of it."""
        if fidelity is None:
            (log_s,), _ = belief.marginals(np.array([row]))
            return self.full_node_s(row, float(log_s))
        (log_s,), _ = belief.marginals_of(self._predictions.part(row, fidelity).model)
        nodes = fidelity.reduced(self._problem.layouts.layout(row)).num_nodes
        return self._costs.node_s(nodes, float(np.exp(log_s)), is_cheap=True)

    def full_node_s(self, row: int, log_s: float) -> float:
        """Expected node-seconds of a full probe."""
        nodes = self._problem.layouts.layout(row).num_nodes
        return self._costs.node_s(nodes, float(np.exp(log_s)))

    def least_full_node_s(self, rows: Ints, log_s: Floats) -> float:
        """Node-seconds of the full probe that takes least; infinite without layouts.

        Only its steps count: how long probes take to start, which differs much between machines, is
        an assumption, and must not keep a budget from being used.
        """
        problem = self._problem
        nodes = problem.without_jobs.column("num_nodes")[problem.layout_rows(rows)]
        node_s = nodes * replace(self._costs, start_s=0.0).seconds(np.exp(log_s))
        return float(node_s.min(initial=np.inf))

    def is_turn_of_full(
        self, left_node_s: float, gain: float, node_s: float, cheap_gain: float, cheap_node_s: float
    ) -> bool:
        """Whether the most promising layout of cheap probes is measured in full now.

        Args:
            left_node_s: what the budget leaves; it pays for that.
            gain: expected from measuring it in full; infinite where no layout was.
            node_s: expected node-seconds of that.
            cheap_gain: expected from the best probe of another layout.
            cheap_node_s: expected node-seconds of that.
        """
        if left_node_s < _RESERVE * node_s + cheap_node_s:
            return gain >= _LAST_WORTH  # what cheap probes find now could not be measured in full
        if cheap_gain >= WORTH:
            return False
        # What a cheap probe finds counts only once it was measured in full, too.
        return gain >= WORTH or gain / node_s > cheap_gain / (cheap_node_s + node_s)

    @staticmethod
    def _gain(candidate: Candidate, error: float) -> float:
        """Expected improvement once the layout's figure is known but for an error."""
        learnt = candidate.log_sd**2 / np.hypot(candidate.log_sd, error)
        return float(expected_improvement(candidate.above_best, learnt))

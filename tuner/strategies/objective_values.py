"""The value of a layout: the logarithm of its objective, or one figure of several objectives.

Several objectives get new random weights at each proposal (ParEGO, Knowles 2006) and are combined
by an augmented Chebyshev function, so that proposals spread along the Pareto front. One proposal in
three considers the first objective only, which ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.belief.observation import Observation
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.objectives import MEMORY_HEADROOM, objective_factors
from layout_tuner.tuner.strategies.search_problem import SearchProblem

FIRST_ALONE: Final = 3
"""Every third proposal considers the first objective only."""
_SUM_WEIGHT: Final = 0.05
"""Weight of the sum of the objectives beside the worst one, as in ParEGO."""
_LEAST_RANGE: Final = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Weighing:
    """How one proposal combines several objectives."""

    weights: Floats
    """Share of each objective; they sum to 1."""
    low: Floats
    """Each objective's value at the lower end of its range."""
    span: Floats
    """Length of each range."""

    def figure(self, values: Floats) -> Floats:
        """One figure (more is better) of values whose last axis is the objectives."""
        if len(self.weights) == 1:
            return np.asarray(values[..., 0])
        scaled = (values - self.low) / self.span
        # An objective with weight 0 does not count, however bad it is.
        losses = self.weights * (1.0 - scaled)
        figure = -losses.max(axis=-1) - _SUM_WEIGHT * losses.sum(axis=-1)
        return np.asarray(figure * self.span[0])


class ObjectiveValues:
    """The objectives of a problem over its layouts, as logarithms or shares: more is better."""

    def __init__(self, problem: SearchProblem, columns: LayoutColumns) -> None:
        self._names = problem.objectives
        self._layout_rows = problem.layout_rows
        self._memory_bytes = float(problem.cluster.device_memory_bytes)
        throughputs = [name for name in self._names if name != MEMORY_HEADROOM]
        self._log_factors = {
            name: np.log(objective_factors(name, columns, problem.model)) for name in throughputs
        }

    @property
    def num_objectives(self) -> int:
        return len(self._names)

    def log_step_s(self, row: int, observation: Observation) -> float:
        """Logarithm of a completed layout's step time."""
        if observation.step_time_s is not None:
            return float(np.log(observation.step_time_s))
        assert observation.objective is not None, "it completed"
        (at,) = self._layout_rows(np.array([row]))
        return float(self._log_factors[self._names[0]][at] - np.log(observation.objective))

    def values(self, rows: Ints, log_s: Floats, peak_bytes: Floats) -> Floats:
        """Every objective of some layouts, along an added last axis.

        The last axis of `log_s`, logarithms of their step times, is the layouts; their peaks of
        memory are of the same shape.
        """
        return self.values_of_layouts(self._layout_rows(rows), log_s, peak_bytes)

    def values_of_layouts(self, rows: Ints, log_s: Floats, peak_bytes: Floats) -> Floats:
        """The same by positions among the layouts without their jobs' settings."""
        return np.stack(
            [
                1.0 - peak_bytes / self._memory_bytes
                if name == MEMORY_HEADROOM
                else self._log_factors[name][rows] - log_s
                for name in self._names
            ],
            axis=-1,
        )

    def shares(self, values: Floats, best: Floats) -> Floats:
        """Objectives as numbers from 0 on, whose products compare fronts.

        `values` are as `values` returns them; throughputs become shares of the best value.
        """
        is_share = np.array([name == MEMORY_HEADROOM for name in self._names])
        return np.where(is_share, values, np.exp(np.where(is_share, 0.0, values - best)))

    def weighing(self, values: Floats, num_asked: int, rng: np.random.Generator) -> Weighing:
        """The weights of the objectives for this proposal.

        `values` are those expected of the candidates, one row each; `num_asked` are the proposals
        so far.
        """
        num_objectives = len(self._names)
        weights = rng.dirichlet(np.ones(num_objectives))
        if num_objectives == 1 or num_asked % FIRST_ALONE == 0:
            weights = np.eye(num_objectives)[0]
        low, high = values.min(axis=0), values.max(axis=0)
        return Weighing(weights=weights, low=low, span=np.maximum(high - low, _LEAST_RANGE))

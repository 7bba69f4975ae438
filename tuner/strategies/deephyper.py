"""DeepHyper's centralised Bayesian optimisation (CBO) over the enumerated legal set.

Everything peculiar to DeepHyper 0.13 stays in this file. What it would get wrong, and what is done:

- It has no pending set and proposes twice. It draws its candidates from `set_sampling_fn`, which
  here holds free layouts only, and pending ones are told with a lie (constant liar).
- Its state cannot be saved, its generator moves with every call, and it keeps every surrogate it
  ever fitted. A new CBO is built for every proposal and told everything at once: one fit a
  proposal, however many are pending, and the same proposal after a restart.
- It refines its trees whenever it stagnates, by a state of its own; here they are fine throughout.
- Its failures are strings, do not count as initial points, end the search after a hundred, and
  are worth as much as the worst success. It never sees one: failures are told as numbers.
- It renames a results.csv that it finds in the working directory, unless it writes none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np
from deephyper.hpo import CBO, HpProblem
from numpy.typing import NDArray

from tuner.strategies.base import History, LayoutSet
from tuner.strategies.encoding import KnobRanks

MAX_CANDIDATES: Final = 8_000
"""Free layouts that one proposal weighs: a seeded draw, plus the surroundings of the best."""
NUM_BEST: Final = 5
"""Best layouts whose surroundings are always among the candidates."""
MAX_NEIGHBOURS: Final = 200
"""Candidates taken from the surroundings of each."""
KAPPA: Final = 1.96
KAPPA_FINAL: Final = 0.01
KAPPA_PERIOD: Final = 10
"""Proposals over which UCB goes from exploring (KAPPA) to exploiting (KAPPA_FINAL), then again."""
NUM_TREES: Final = 10


class DeepHyperProposer:
    """Random legal layouts first, then the best upper confidence bound of extremely random trees."""

    def __init__(
        self,
        layouts: LayoutSet,
        *,
        seed: int,
        num_initial: int | None = None,
        max_peak_memory_bytes: float = math.inf,
    ) -> None:
        """Prepares the encoding.

        Args:
            layouts: what may be proposed.
            seed: decides every draw.
            num_initial: layouts to draw at random before the first fit, failures included; by
                default one more than there are knobs that vary.
            max_peak_memory_bytes: what leaves the headroom that is asked for; a layout whose peak was
                larger counts as a failure.
        """
        self._max_peak_memory_bytes = max_peak_memory_bytes
        self._ranks = KnobRanks(layouts)
        self._seed = seed
        self._num_initial = len(self._ranks.names) + 1 if num_initial is None else num_initial

    def propose(self, history: History) -> int:
        """Draws at random until there is something to fit, then asks CBO."""
        rng = np.random.default_rng([self._seed, history.num_taken])
        free = np.flatnonzero(history.is_free)
        told, values = _told_values(history, self._successes(history))
        if history.num_taken < self._num_initial or len(told) == 0 or len(free) == 1:
            return int(rng.choice(free))
        candidates = self._candidates(history, free, rng)
        return self._ask_cbo(told, values, candidates, history.num_taken, rng)

    def _successes(self, history: History) -> dict[int, float]:
        """Objective by position, of what ran and keeps the headroom."""
        peaks = {index: told.peak_memory_bytes or 0 for index, told in history.observations.items()}
        return {
            index: value
            for index, value in history.successes()
            if peaks[index] <= self._max_peak_memory_bytes
        }

    def _candidates(
        self, history: History, free: NDArray[np.int64], rng: np.random.Generator
    ) -> NDArray[np.int64]:
        """Free layouts in a random order: of equally good ones CBO takes the first."""
        if len(free) <= MAX_CANDIDATES:
            return rng.permutation(free)
        ran = self._successes(history).items()
        best = sorted(ran, key=lambda item: item[1], reverse=True)[:NUM_BEST]
        groups = [rng.choice(free, MAX_CANDIDATES, replace=False)]
        for index, _ in best:
            steps = self._ranks.steps_from(index)[free]
            groups.append(free[np.argpartition(steps, MAX_NEIGHBOURS)[:MAX_NEIGHBOURS]])
        return rng.permutation(np.unique(np.concatenate(groups)))

    def _ask_cbo(
        self,
        told: NDArray[np.int64],
        values: NDArray[np.float64],
        candidates: NDArray[np.int64],
        num_asked: int,
        rng: np.random.Generator,
    ) -> int:
        """Fits once to all that was told and picks among the candidates."""
        names = self._ranks.names
        sample = self._points(candidates)
        problem = HpProblem()
        for name, num_values in zip(names, self._ranks.num_values, strict=True):
            problem.add_hyperparameter(list(range(num_values)), name)
        problem.set_sampling_fn(lambda _: sample)
        search = CBO(
            problem,
            random_state=int(rng.integers(2**31)),
            checkpoint_history_to_csv=False,
            surrogate_model="ET",
            surrogate_model_kwargs={"n_estimators": NUM_TREES, "min_impurity_decrease": 0.0},
            acq_func="UCB",
            acq_func_kwargs={
                "kappa": _kappa(num_asked - self._num_initial),
                "scheduler": {"type": "constant", "delay": 0},
            },
            acq_optimizer="sampling",
            acq_optimizer_kwargs={
                "n_points": len(candidates),
                "filter_duplicated": False,
                "filter_failures": "min",
                "max_total_failures": -1,
                "outliers_iqr_factor": math.inf,
            },
            n_initial_points=1,
        )
        search.tell(list(zip(self._points(told), values.tolist(), strict=True)))
        (point,) = search.ask(1)
        wanted = np.array([point[name] for name in names])
        matches = np.flatnonzero((self._ranks.rows(candidates) == wanted).all(axis=1))
        return int(candidates[matches[0]])

    def _points(self, indices: NDArray[np.int64]) -> list[dict[str, int]]:
        """Layouts as DeepHyper takes them, by the names of the knobs."""
        names = self._ranks.names
        return [dict(zip(names, row, strict=True)) for row in self._ranks.rows(indices).tolist()]


def _told_values(
    history: History, successes: Mapping[int, float]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Positions and values to fit: log objectives, failures and lies included; empty if no success.

    A failure is told as the worst success, or as half the median one if that is worse; without it,
    one success among failures would look like any of them. A pending layout is told as the worst
    success (DeepHyper's "cl_min"), which keeps the next proposal away from it.
    """
    logs = {index: math.log(value) for index, value in successes.items()}
    if not logs:
        return np.empty(0, dtype=np.int64), np.empty(0)
    worst = min(logs.values())
    failure = min(worst, float(np.median(list(logs.values()))) - math.log(2))
    values = {index: logs.get(index, failure) for index in history.observations}
    for index in history.pending:
        values.setdefault(index, worst)
    return np.array(list(values), dtype=np.int64), np.array(list(values.values()))


def _kappa(num_asked: int) -> float:
    """DeepHyper's default schedule, which it would derive from its own count of asks."""
    rate = math.log(KAPPA / KAPPA_FINAL) / KAPPA_PERIOD
    return KAPPA * math.exp(-rate * (max(num_asked, 0) % KAPPA_PERIOD))

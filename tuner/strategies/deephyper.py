"""DeepHyper's centralised Bayesian optimisation (CBO) over the enumerated legal set.

This module holds everything that is specific to DeepHyper 0.13: the strategies `deephyper` and
`deephyper+memory`. How it deals with DeepHyper's behaviour:

- CBO has no pending set and may propose a layout twice. Its candidates come from `set_sampling_fn`,
  which here returns free layouts only. Pending layouts are reported with a made-up value (constant
  liar).
- CBO's state cannot be saved, its generator changes with every call, and it keeps all its
  surrogates. So a new CBO is built for every proposal and gets all outcomes at once: one fit for a
  proposal, and the same proposal after a restart.
- CBO refines its trees when it stagnates, depending on its state; here they are always fine.
- CBO's failures are strings. They do not count as initial points, end the search after a hundred,
  and are worth as much as the worst success. So failures are reported as numbers.
- CBO renames a results.csv in the working directory; `checkpoint_history_to_csv=False` prevents
  that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from deephyper.hpo import CBO, HpProblem
from numpy.typing import NDArray

from layout_tuner.array_types import Bools, Floats, Ints
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS
from layout_tuner.tuner.strategies.ask_and_tell import History, LayoutSet, Proposer

MAX_CANDIDATES: Final = 8_000
"""Free layouts that one proposal compares: a seeded draw, and the neighbours of the best
layouts."""
NUM_BEST: Final = 5
"""Best layouts whose neighbours are always among the candidates."""
MAX_NEIGHBOURS: Final = 200
"""Neighbours of each of them."""
KAPPA: Final = 1.96
KAPPA_FINAL: Final = 0.01
KAPPA_PERIOD: Final = 10
"""Proposals over which UCB goes from exploring (KAPPA) to exploiting (KAPPA_FINAL),
periodically."""
NUM_TREES: Final = 10

_LARGEST_SHORT: Final = np.iinfo(np.int16).max


NUM_WARM: Final = 10
"""Layouts of the best estimates with which `deephyper+memory` starts."""


class DeepHyperProposer(Proposer):
    """Random layouts first, then the best upper confidence bound of extremely random trees.

    With estimates, layouts that are estimated not to fit come last, and the first ones are not
    drawn.
    """

    def __init__(
        self,
        layouts: LayoutSet,
        *,
        seed: int,
        max_peak_memory_bytes: float = math.inf,
        fits: Bools | None = None,
        warm_start: Sequence[int] = (),
    ) -> None:
        """Prepares the encoding.

        A layout with a larger peak than `max_peak_memory_bytes`, which keeps the memory headroom,
        counts as a failure. `fits` says by layout whether its memory is estimated to fit, by
        default of all; `warm_start` has positions of the layouts to propose first.
        """
        self._fits = np.ones(len(layouts), dtype=np.bool_) if fits is None else fits
        self._warm_start = warm_start
        self._max_peak_memory_bytes = max_peak_memory_bytes
        self._ranks = KnobRanks(layouts)
        self._seed = seed
        self._num_initial = len(self._ranks.names) + 1
        """Layouts that are drawn at random before the first fit, failures included."""

    def propose(self, history: History) -> int:
        """The warm start, then random draws until there is enough to fit, then CBO's proposal."""
        for index in self._warm_start:
            if history.is_free[index]:
                return index
        rng = np.random.default_rng([self._seed, history.num_taken])
        free = np.flatnonzero(history.is_free & self._fits)
        if not len(free):
            free = np.flatnonzero(history.is_free)
        positions, values = _observed_values(history, self._successes(history))
        if history.num_taken < self._num_initial or len(positions) == 0 or len(free) == 1:
            return int(rng.choice(free))
        candidates = self._candidates(history, free, rng)
        return self._ask_cbo(positions, values, candidates, history.num_taken, rng)

    def _successes(self, history: History) -> dict[int, float]:
        """Objectives of completed layouts that keep the headroom, by position."""
        ranked = history.ranked(self._max_peak_memory_bytes)
        return {index: seen.objective for index, seen in ranked if seen.objective is not None}

    def _candidates(self, history: History, free: Ints, rng: np.random.Generator) -> Ints:
        """Free layouts in a random order: of equally good ones CBO proposes the first."""
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
        positions: Ints,
        values: Floats,
        candidates: Ints,
        num_asked: int,
        rng: np.random.Generator,
    ) -> int:
        """Fits one surrogate to all observations and picks among the candidates."""
        names = self._ranks.names
        sample = self._points(candidates)
        problem = HpProblem()
        for name, num_values in zip(names, self._ranks.num_values, strict=True):
            problem.add_hyperparameter(list(range(num_values)), name)
        problem.set_sampling_fn(lambda _: sample)
        kappa = _kappa(num_asked - self._num_initial)
        search = _cbo(
            problem,
            seed=int(rng.integers(2**31)),
            kappa=kappa,
            num_candidates=len(candidates),
            surrogate_model="ET",
            surrogate_model_kwargs={"n_estimators": NUM_TREES, "min_impurity_decrease": 0.0},
        )
        search.tell(list(zip(self._points(positions), values.tolist(), strict=True)))
        (point,) = search.ask(1)
        wanted = np.array([point[name] for name in names])
        matches = np.flatnonzero((self._ranks.rows(candidates) == wanted).all(axis=1))
        return int(candidates[matches[0]])

    def _points(self, indices: Ints) -> list[dict[str, int]]:
        """Layouts as DeepHyper's points, by the names of the knobs."""
        names = self._ranks.names
        return [dict(zip(names, row, strict=True)) for row in self._ranks.rows(indices).tolist()]


def _observed_values(history: History, successes: Mapping[int, float]) -> tuple[Ints, Floats]:
    """Positions and values to fit, with failures and pending layouts; empty without a success.

    A failure gets the value of the worst success, or half of the median success if that is lower:
    otherwise the only success would be worth as much as a failure. A pending layout gets the value
    of the worst success (DeepHyper's "cl_min"), which keeps the next proposal away from it.
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
    """DeepHyper's default schedule, which DeepHyper computes from its own count of asks."""
    rate = math.log(KAPPA / KAPPA_FINAL) / KAPPA_PERIOD
    return KAPPA * math.exp(-rate * (max(num_asked, 0) % KAPPA_PERIOD))


class KnobRanks:
    """The legal set as ranks: for each knob that varies, the rank of every layout's value.

    Values would be worse: degrees are mostly powers of two, and a tree that cuts an axis at a
    uniformly drawn place hardly ever separates 1 from 2 on an axis that ends at 512.
    """

    def __init__(self, layouts: LayoutSet) -> None:
        # One knob at a time: all columns of millions of layouts would take hundreds of megabytes.
        varying = {}
        for name in sorted(LAYOUT_FIELDS):
            ranks = _ranks(layouts.column(name))
            if ranks.max(initial=0) > 0:
                varying[name] = ranks
        self.names = tuple(varying)
        """Knobs that take more than one value, in alphabetical order."""
        self._columns = tuple(varying.values())
        self.num_values = tuple(int(ranks.max()) + 1 for ranks in self._columns)
        """How many values each knob takes."""
        self._num_layouts = len(layouts)

    def rows(self, indices: Ints) -> NDArray[np.int32]:
        """Ranks of some layouts, by layout and knob."""
        rows = np.empty((len(indices), len(self.names)), dtype=np.int32)
        for place, ranks in enumerate(self._columns):
            rows[:, place] = ranks[indices]
        return rows

    def steps_from(self, index: int) -> NDArray[np.int32]:
        """Distance of each layout from one layout: the sum of the differences of their ranks."""
        steps = np.zeros(self._num_layouts, dtype=np.int32)
        for ranks in self._columns:
            steps += np.abs(ranks - ranks[index])
        return steps


def _ranks(values: Ints) -> NDArray[np.signedinteger[Any]]:
    """Ranks through a table of all values up to the largest, at most 2^20, which avoids sorting."""
    occurs = np.zeros(int(values.max(initial=0)) + 1, dtype=np.bool_)
    occurs[values] = True
    num_values = int(np.count_nonzero(occurs))
    short: type[np.signedinteger[Any]] = np.int16 if num_values <= _LARGEST_SHORT else np.int32
    rank_of = (np.cumsum(occurs) - 1).astype(short)
    return rank_of[values]


def _cbo(
    problem: HpProblem, *, seed: int, kappa: float, num_candidates: int, **surrogate: Any
) -> CBO:
    """A CBO that proposes the candidate with the best upper confidence bound."""
    return CBO(
        problem,
        random_state=seed,
        checkpoint_history_to_csv=False,
        acq_func="UCB",
        acq_func_kwargs={"kappa": kappa, "scheduler": {"type": "constant", "delay": 0}},
        acq_optimizer="sampling",
        acq_optimizer_kwargs={
            "n_points": num_candidates,
            "filter_duplicated": False,
            "filter_failures": "min",
            "max_total_failures": -1,
            "outliers_iqr_factor": math.inf,
        },
        n_initial_points=1,
        **surrogate,
    )

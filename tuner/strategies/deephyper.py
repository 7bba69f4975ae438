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
- CBO gives an inactive hyperparameter of a candidate its first value, and takes told points as
  they are. So the first value of a job knob is its default, which it has where its condition fails.
  With conditions CBO takes a DataFrame of candidates, and a third of a millisecond for each.
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
from pandas import DataFrame

from layout_tuner.array_types import Bools, Floats, Ints
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS
from layout_tuner.search_spaces.spaces.job_set import JobSet
from layout_tuner.tuner.strategies.ask_and_tell import History, LayoutSet, Proposer
from layout_tuner.tuner.strategies.job_parameters import JobParameters

MAX_CANDIDATES: Final = 8_000
"""Free layouts that one proposal compares: a seeded draw, and the neighbours of the best
layouts."""
NUM_BEST: Final = 5
"""Best layouts whose neighbours are always among the candidates."""
CONDITIONAL_CANDIDATES: Final = 2_000
"""The same where job knobs have conditions, which CBO checks one by one."""
MAX_LISTED: Final = 5_000_000
"""Positions up to which all free ones are listed; there may be more jobs than that."""
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
        counts as a failure. `fits` says by layout (without settings) whether its memory is
        estimated to fit, by default of all; `warm_start` has positions of the layouts to propose
        first.
        """
        legal = layouts.legal if isinstance(layouts, JobSet) else layouts
        self._fits = np.ones(len(legal), dtype=np.bool_) if fits is None else fits
        self._warm_start = warm_start
        self._max_peak_memory_bytes = max_peak_memory_bytes
        self._layouts = layouts
        self._layout_rows = (
            layouts.layout_rows if isinstance(layouts, JobSet) else lambda rows: rows
        )
        self._ranks = KnobRanks(layouts)
        self._seed = seed
        self._num_initial = len(self._ranks.names) + 1
        """Layouts that are drawn at random before the first fit, failures included."""

    def propose(self, history: History) -> int:
        """The warm start, then random draws until there is enough to fit, then CBO's proposal."""
        for index in self._warm_start:
            if history.is_free(index):
                return index
        rng = np.random.default_rng([self._seed, history.num_taken])
        free = self._free(history, rng)
        positions, values = _observed_values(history, self._successes(history))
        if history.num_taken < self._num_initial or len(positions) == 0 or len(free) == 1:
            return int(rng.choice(free))
        candidates = self._candidates(history, free, rng)
        return self._ask_cbo(positions, values, candidates, history.num_taken, rng)

    def _free(self, history: History, rng: np.random.Generator) -> Ints:
        """Free layouts, those that are estimated to fit where there is one.

        Of many jobs it is a draw of some.
        """
        among = None
        if len(self._layouts) > MAX_LISTED:
            among = np.unique(rng.integers(len(self._layouts), size=2 * MAX_CANDIDATES))
        free = history.free(among)
        fitting = free[self._fits[self._layout_rows(free)]]
        return fitting if len(fitting) else free

    def _successes(self, history: History) -> dict[int, float]:
        """Objectives of completed layouts that keep the headroom, by position."""
        ranked = history.ranked(self._max_peak_memory_bytes)
        return {index: seen.objective for index, seen in ranked if seen.objective is not None}

    def _candidates(self, history: History, free: Ints, rng: np.random.Generator) -> Ints:
        """Free layouts in a random order: of equally good ones CBO proposes the first."""
        most = CONDITIONAL_CANDIDATES if self._ranks.conditions else MAX_CANDIDATES
        if len(free) <= most:
            return rng.permutation(free)
        ran = self._successes(history).items()
        best = sorted(ran, key=lambda item: item[1], reverse=True)[:NUM_BEST]
        groups = [rng.choice(free, most, replace=False)]
        groups += [self._ranks.neighbours(index, free, history) for index, _ in best]
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
        parameters = {
            name: problem.add_hyperparameter(list(range(num_values)), name)
            for name, num_values in zip(names, self._ranks.num_values, strict=True)
        }
        for name, condition in self._ranks.conditions.items():
            problem.add_condition(condition.of(parameters[name], parameters))
        is_conditional = bool(self._ranks.conditions)
        problem.set_sampling_fn(lambda _: DataFrame(sample) if is_conditional else sample)
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
        self._jobs = layouts if isinstance(layouts, JobSet) else None
        legal = layouts if self._jobs is None else self._jobs.legal
        # One knob at a time: all columns of millions of layouts would take hundreds of megabytes.
        varying = {}
        for name in sorted(LAYOUT_FIELDS):
            ranks = _ranks(legal.column(name))
            if ranks.max(initial=0) > 0:
                varying[name] = ranks
        self._columns = tuple(varying.values())
        parameters = None if self._jobs is None else JobParameters(self._jobs, varying)
        self._parameters = parameters
        self.names = (*varying, *(parameters.names if parameters else ()))
        """Knobs that take more than one value: of layouts in alphabetical order, then of jobs."""
        self.num_values = (
            *(int(ranks.max()) + 1 for ranks in self._columns),
            *(parameters.counts if parameters else ()),
        )
        """How many values each knob takes."""
        self.conditions = parameters.conditions if parameters else {}
        """Conditions of job knobs by name."""
        self._num_layouts = len(legal)

    def rows(self, indices: Ints) -> NDArray[np.int32]:
        """Ranks of some layouts, by layout and knob."""
        at, rows = indices, np.empty((len(indices), len(self.names)), dtype=np.int32)
        if self._jobs is not None and self._parameters is not None:
            at, settings = self._jobs.layout_rows(indices), self._jobs.setting_places(indices)
            rows[:, len(self._columns) :] = self._parameters.ranks[settings]
        for place, ranks in enumerate(self._columns):
            rows[:, place] = ranks[at]
        return rows

    def steps_from(self, index: int) -> NDArray[np.int32]:
        """Distance of each layout from one layout: the sum of the differences of their ranks."""
        steps = np.zeros(self._num_layouts, dtype=np.int32)
        for ranks in self._columns:
            steps += np.abs(ranks - ranks[index])
        return steps

    def neighbours(self, index: int, free: Ints, history: History) -> Ints:
        """Free layouts near one; free jobs of the layouts nearest to that of a job."""
        if self._jobs is None:
            steps = self.steps_from(index)[free]
            return free[np.argpartition(steps, MAX_NEIGHBOURS)[:MAX_NEIGHBOURS]]
        (row,) = self._jobs.layout_rows(np.array([index]))
        order = np.argsort(self.steps_from(int(row)), kind="stable")[:MAX_NEIGHBOURS]
        jobs = history.free(self._jobs.jobs_of(order))
        steps = np.abs(self.rows(jobs) - self.rows(np.array([index]))).sum(axis=1)
        return jobs[np.argsort(steps, kind="stable")[:MAX_NEIGHBOURS]]


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

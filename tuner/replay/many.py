"""Many replays, over cells, strategies and seeds, on several cores."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import product, repeat

import scipy.linalg  # noqa: F401 - its own BLAS must be there for its threads to be limited
from threadpoolctl import threadpool_limits

from search_spaces.tables import TableCell
from tuner.errors import StrategyUnknownError
from tuner.knowledge import Knowledge
from tuner.problem import SearchProblem
from tuner.replay.cell_layouts import CellLayouts
from tuner.replay.errors import ReplayFailedError
from tuner.replay.run import ReplayRun, replay_cell
from tuner.strategies.registry import STRATEGIES, make_strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPlan:
    """What is replayed: every strategy on every cell with every seed."""

    cells: tuple[TableCell, ...]
    strategies: tuple[str, ...]
    num_seeds: int = 1
    """Seeds from 0 on."""
    pending: int = 1
    """Probes that run at once."""
    probes: int = 60
    """Probes a run."""
    knowledge: Knowledge | None = None
    """Measurements from elsewhere; None: cold."""

    def check(self) -> None:
        """Refuses what would only show after minutes.

        Raises:
            StrategyUnknownError: there is no strategy of that name.
            ReplayFailedError: nothing in a cell completed.
        """
        if not self.strategies:
            raise StrategyUnknownError(
                f"no strategy is named; choose from {', '.join(sorted(STRATEGIES))}"
            )
        for cell in self.cells:
            if not cell.num_completed:
                raise ReplayFailedError(
                    f"cell {cell.key}: no row is completed, so there is no best layout; leave it out "
                    "with --cell"
                )
        first = self.cells[0]
        problem = SearchProblem(
            layouts=CellLayouts(first), model=first.model, cluster=first.cluster
        )
        for name in self.strategies:
            make_strategy(name, problem, seed=0)


def replay_all(plan: ReplayPlan, *, jobs: int = 1) -> Iterator[ReplayRun]:
    """Runs the plan, strategy by strategy and cell by cell; the order does not depend on `jobs`.

    Raises:
        ReplayFailedError: a strategy failed; the first to do so ends the replay.
        StrategyUnknownError: there is no strategy of that name.
    """
    plan.check()
    seeds = range(plan.num_seeds)
    tasks = [(c, name, seed) for name, c, seed in product(plan.strategies, plan.cells, seeds)]
    settings = (plan.pending, plan.probes, plan.knowledge)
    if jobs == 1:
        # The products are small: threads would only wait for each other.
        with threadpool_limits(1):
            for task in tasks:
                yield _run_one(settings, task)
        return
    # Spawned: a fork of a process that has started BLAS's threads can hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        min(jobs, len(tasks)), mp_context=context, initializer=threadpool_limits, initargs=(1,)
    )
    try:
        yield from pool.map(_run_one, repeat(settings), tasks)
    except BrokenProcessPool as error:
        raise ReplayFailedError("a process of the replay died; was it out of memory?") from error
    finally:
        pool.shutdown(cancel_futures=True)


_Settings = tuple[int, int, Knowledge | None]
_Task = tuple[TableCell, str, int]


def _run_one(settings: _Settings, task: _Task) -> ReplayRun:
    return replay_cell(*task, *settings)


def by_strategy(runs: Sequence[ReplayRun]) -> dict[str, list[ReplayRun]]:
    """The runs of each strategy, in their order."""
    groups: dict[str, list[ReplayRun]] = {}
    for run in runs:
        groups.setdefault(run.strategy, []).append(run)
    return groups

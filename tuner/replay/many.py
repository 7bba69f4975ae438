"""Many replays, over cells, strategies and seeds, on several cores."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import product

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
class ReplayTask:
    """One search: what `replay_cell` takes."""

    cell: TableCell
    strategy: str
    seed: int
    pending: int
    probes: int
    knowledge: Knowledge | None = None

    def run(self) -> ReplayRun:
        """Searches the cell."""
        return replay_cell(
            self.cell, self.strategy, self.seed, self.pending, self.probes, self.knowledge
        )


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
            layouts=CellLayouts(first),
            model=first.model,
            cluster=first.cluster,
            software=first.key.software,
        )
        for name in self.strategies:
            make_strategy(name, problem, seed=0)

    def tasks(self) -> list[ReplayTask]:
        """Every search, strategy by strategy and cell by cell."""
        return [
            ReplayTask(
                cell=cell,
                strategy=strategy,
                seed=seed,
                pending=self.pending,
                probes=self.probes,
                knowledge=self.knowledge,
            )
            for strategy, cell, seed in product(self.strategies, self.cells, range(self.num_seeds))
        ]


def replay_all(tasks: Sequence[ReplayTask], *, jobs: int = 1) -> Iterator[ReplayRun]:
    """Runs the searches; the order of the answers is that of the tasks, whatever `jobs` is.

    Raises:
        ReplayFailedError: a strategy failed; the first to do so ends the replay.
    """
    if jobs == 1:
        # The products are small: threads would only wait for each other.
        with threadpool_limits(1):
            for task in tasks:
                yield task.run()
        return
    # Spawned: a fork of a process that has started BLAS's threads can hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        min(jobs, len(tasks)), mp_context=context, initializer=threadpool_limits, initargs=(1,)
    )
    try:
        yield from pool.map(ReplayTask.run, tasks)
    except BrokenProcessPool as error:
        raise ReplayFailedError("a process of the replay died; was it out of memory?") from error
    finally:
        pool.shutdown(cancel_futures=True)


def by_strategy(runs: Sequence[ReplayRun]) -> dict[str, list[ReplayRun]]:
    """The runs of each strategy, in their order."""
    groups: dict[str, list[ReplayRun]] = {}
    for run in runs:
        groups.setdefault(run.strategy, []).append(run)
    return groups

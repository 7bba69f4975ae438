"""Replayed searches: a strategy asks for layouts, and the rows of a table are the outcomes.

Probes run asynchronously as in a campaign: `pending` of them run at once, and the strategy is asked
for the next one when one ends. In simulated time a probe lasts ITERATIONS steps, so that fast
layouts end first. A failed probe lasts one step of the cell's median step time, because a layout
runs out of memory in its first iteration. The start-up time, equal for all layouts, is left out.
"""

from __future__ import annotations

import heapq
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import product
from typing import Final

import scipy.linalg  # noqa: F401 - loads scipy's own BLAS, so that threadpool_limits applies to it
from threadpoolctl import threadpool_limits

from search_spaces.belief.known_measurements import Knowledge
from search_spaces.belief.observation import FAILED, INFEASIBLE, Observation
from search_spaces.spec.layout import Layout
from search_spaces.tables import CellKey, TableCell, TableRow
from tuner.errors import ReplayFailedError, StrategyUnknownError
from tuner.replay.cell_layouts import CellLayouts
from tuner.strategies.base import LayoutSearch
from tuner.strategies.problem import SearchProblem
from tuner.strategies.registry import STRATEGIES, make_strategy

ITERATIONS: Final = 10
"""Iterations of a probe, as in arXiv:2312.12705 and in campaigns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedProbe:
    """One probe, answered from the table."""

    layout: Layout
    """The layout that the strategy asked for."""
    regret: float | None
    """Share of the cell's best throughput that is lost with this layout; None: it did not
    complete."""
    ended_at_s: float
    """Simulated seconds since the search began."""
    node_seconds: float
    """Simulated cost: the probe's seconds times its nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRun:
    """One search of one cell by one strategy with one seed."""

    cell: CellKey
    strategy: str
    seed: int
    num_probes: int
    """Probes that were allowed; the search ends earlier once the best layout is found."""
    probes: tuple[ReplayedProbe, ...]
    """In the order in which they ended."""
    search_s: float
    """Real seconds that the strategy took for all asks and tells."""

    def probes_to(self, share: float) -> int | None:
        """Number of the first probe within `share` of the best; None: there is none."""
        for count, probe in enumerate(self.probes, 1):
            # Rounded, so that a layout exactly 5 % below the best is within 5 %.
            if probe.regret is not None and round(probe.regret, 9) <= share:
                return count
        return None

    def regret_after(self, num_probes: int) -> float:
        """Regret of the best among the first probes; 1 while none completed."""
        regrets = [p.regret for p in self.probes[:num_probes] if p.regret is not None]
        return min(regrets, default=1.0)

    def failed_within(self, num_probes: int) -> int:
        """How many of the first probes did not complete."""
        return sum(probe.regret is None for probe in self.probes[:num_probes])


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayTask:
    """One search of a cell, with the cell's measurements as the truth."""

    cell: TableCell
    """The truth; its layouts are the legal set."""
    strategy: str
    """The name that campaigns use."""
    seed: int
    """Decides every draw of the strategy."""
    pending: int
    """Probes that run at once."""
    probes: int
    """How many probes the strategy may ask for."""
    knowledge: Knowledge = field(default_factory=Knowledge)
    """Measurements from elsewhere; without any the search starts cold."""

    def run(self) -> ReplayRun:
        """Searches the cell until its best layout was probed.

        Raises:
            ReplayFailedError: no layout of the cell completed, or the strategy failed.
            StrategyUnknownError: there is no strategy of that name.
        """
        cell = self.cell
        if not cell.num_completed:
            raise ReplayFailedError(
                f"cell {cell.key}: no row is completed, so there is no best layout"
            )
        layouts = CellLayouts(cell)
        strategy = make_strategy(
            self.strategy, problem_of(cell, layouts, self.knowledge), seed=self.seed
        )
        search = _Search(layouts, strategy, pending=self.pending, num_probes=self.probes)
        try:
            search.run()
        except Exception as error:
            raise ReplayFailedError(
                f"strategy {self.strategy!r} failed on cell {cell.key}, seed {self.seed}, after "
                f"{len(search.returned)} probes: {type(error).__name__}: {error}"
            ) from error
        return ReplayRun(
            cell=cell.key,
            strategy=self.strategy,
            seed=self.seed,
            num_probes=self.probes,
            probes=tuple(search.returned),
            search_s=search.search_s,
        )


def problem_of(cell: TableCell, layouts: CellLayouts, knowledge: Knowledge) -> SearchProblem:
    """The search problem whose legal layouts are those of a cell."""
    return SearchProblem(
        layouts=layouts,
        model=cell.model,
        cluster=cell.cluster,
        software=cell.key.software,
        knowledge=knowledge,
    )


class _Search:
    """The event loop of one search: a heap of running probes, sorted by their ends."""

    def __init__(
        self, layouts: CellLayouts, strategy: LayoutSearch, *, pending: int, num_probes: int
    ) -> None:
        completed = [row for row in layouts.truth if row.step_time_s and row.tokens_per_s]
        self.returned: list[ReplayedProbe] = []
        self.search_s = 0.0
        self._layouts = layouts
        self._strategy = strategy
        self._pending = pending
        self._num_left = num_probes
        self._best = max(row.tokens_per_s or 0.0 for row in completed)
        self._failed_s = statistics.median(row.step_time_s or 0.0 for row in completed)
        self._running: list[tuple[float, int, TableRow]] = []
        self._now_s = 0.0

    def run(self) -> None:
        """Asks and tells until the best layout is found, or no probe or no layout is left."""
        self._fill()
        while self._running:
            ended_at_s, _, row = heapq.heappop(self._running)
            self._now_s = ended_at_s
            self.returned.append(self._probe(row))
            started = time.perf_counter()
            self._strategy.tell(row.layout, observation_of(row))
            self.search_s += time.perf_counter() - started
            if self.returned[-1].regret == 0.0:
                return  # the best layout is found
            self._fill()

    def _fill(self) -> None:
        while self._num_left and len(self._running) < self._pending:
            started = time.perf_counter()
            layout = self._strategy.ask()
            self.search_s += time.perf_counter() - started
            if layout is None:
                self._num_left = 0
                return
            self._num_left -= 1
            index = self._layouts.index_of(layout)
            assert index is not None, f"the strategy asked for {layout.key}, outside of the cell"
            row = self._layouts.truth[index]
            # Of probes that end at the same time, the one that was asked for first is told first.
            heapq.heappush(
                self._running, (self._now_s + self._duration_s(row), -self._num_left, row)
            )

    def _duration_s(self, row: TableRow) -> float:
        return self._failed_s if row.step_time_s is None else ITERATIONS * row.step_time_s

    def _probe(self, row: TableRow) -> ReplayedProbe:
        rate = row.tokens_per_s
        return ReplayedProbe(
            layout=row.layout,
            regret=None if rate is None else (self._best - rate) / self._best,
            ended_at_s=self._now_s,
            node_seconds=self._duration_s(row) * row.layout.num_nodes,
        )


def observation_of(row: TableRow) -> Observation:
    """A row as an observation; the objective is tokens/s per device."""
    if row.status == "out_of_memory":
        return INFEASIBLE
    if row.tokens_per_s is None:
        return FAILED
    return Observation.completed(
        row.tokens_per_s / row.layout.num_devices,
        step_time_s=row.step_time_s,
        peak_memory_bytes=row.peak_memory_bytes,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayPlan:
    """All searches of a replay: every strategy on every cell with every seed."""

    cells: tuple[TableCell, ...]
    strategies: tuple[str, ...]
    num_seeds: int = 1
    """Seeds from 0 on."""
    pending: int = 1
    """Probes that run at once."""
    probes: int = 60
    """Probes a run."""
    knowledge: Knowledge = field(default_factory=Knowledge)
    """Measurements from elsewhere; without any the searches start cold."""

    def check(self) -> None:
        """Checks the strategies before the first search.

        Raises:
            StrategyUnknownError: there is no strategy of that name.
        """
        if not self.strategies:
            raise StrategyUnknownError(
                f"no strategy is named; choose from {', '.join(sorted(STRATEGIES))}"
            )
        first = self.cells[0]
        problem = problem_of(first, CellLayouts(first), Knowledge())
        for name in self.strategies:
            make_strategy(name, problem, seed=0)

    def tasks(self) -> list[ReplayTask]:
        """Every search, sorted by strategy, cell and seed."""
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
    """Runs the searches in `jobs` processes; the results are in the order of the tasks.

    Raises:
        ReplayFailedError: a strategy failed; the first to do so ends the replay.
    """
    if jobs == 1:
        # The matrix products are too small for several threads.
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
    """The runs of each strategy, in the given order."""
    groups: dict[str, list[ReplayRun]] = {}
    for run in runs:
        groups.setdefault(run.strategy, []).append(run)
    return groups

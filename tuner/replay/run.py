"""One replayed search: a strategy asks, a table answers, and a clock says in which order.

Probes run asynchronously as in a campaign: `pending` of them at once, and the next is asked for when one
returns. A probe lasts ITERATIONS times its step time, so that fast layouts answer first; one that
fails lasts one iteration of the cell's median step time, for out of memory shows in the first. Starting
up is left out: it is the same for every layout.
"""

from __future__ import annotations

import heapq
import statistics
import time
from dataclasses import dataclass
from typing import Final

from search_spaces.layout import Layout
from search_spaces.tables import CellKey, TableCell, TableRow
from tuner.knowledge import Knowledge
from tuner.problem import SearchProblem
from tuner.replay.cell_layouts import CellLayouts
from tuner.replay.errors import ReplayFailedError
from tuner.strategies.base import FAILED, INFEASIBLE, LayoutSearch, Observation
from tuner.strategies.registry import make_strategy

ITERATIONS: Final = 10
"""Iterations of a probe, as the paper's and ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedProbe:
    """One answer of the table."""

    layout: Layout
    """What was asked for."""
    regret: float | None
    """Share of the best throughput that is lost with this layout; None: it did not complete."""
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
    """Probes that were allowed; fewer were run once the best was found."""
    probes: tuple[ReplayedProbe, ...]
    """In the order in which they returned; the best layout ends the search."""
    search_s: float
    """Seconds that the strategy took for all asks and tells: real ones."""

    def probes_to(self, share: float) -> int | None:
        """Probes until the first within `share` of the best returned, itself included, or None."""
        for count, probe in enumerate(self.probes, 1):
            # Rounded, so that a layout exactly 5 % off is within 5 %.
            if probe.regret is not None and round(probe.regret, 9) <= share:
                return count
        return None

    def regret_after(self, num_probes: int) -> float:
        """Regret of the best of the first probes to return; 1 while none completed."""
        regrets = [p.regret for p in self.probes[:num_probes] if p.regret is not None]
        return min(regrets, default=1.0)

    def failed_within(self, num_probes: int) -> int:
        """How many of the first probes did not complete."""
        return sum(probe.regret is None for probe in self.probes[:num_probes])


def replay_cell(
    cell: TableCell,
    strategy_name: str,
    seed: int,
    pending: int,
    probes: int,
    knowledge: Knowledge | None = None,
) -> ReplayRun:
    """Searches a cell with its recorded measurements as the truth, until its best layout returns.

    Args:
        cell: the truth; its layouts are the legal set.
        strategy_name: as campaigns name it.
        seed: decides every draw of the strategy.
        pending: probes that run at once.
        probes: how many may be asked for.
        knowledge: measurements from elsewhere; none is a cold search.

    Raises:
        ReplayFailedError: nothing in the cell completed, or the strategy failed.
        StrategyUnknownError: there is no strategy of that name.
    """
    if not cell.num_completed:
        raise ReplayFailedError(f"cell {cell.key}: no row is completed, so there is no best layout")
    layouts = CellLayouts(cell)
    problem = SearchProblem(
        layouts=layouts,
        model=cell.model,
        cluster=cell.cluster,
        software=cell.key.software,
        knowledge=Knowledge() if knowledge is None else knowledge,
    )
    strategy = make_strategy(strategy_name, problem, seed=seed)
    search = _Search(layouts, strategy, pending=pending, num_probes=probes)
    try:
        search.run()
    except Exception as error:
        raise ReplayFailedError(
            f"strategy {strategy_name!r} failed on cell {cell.key}, seed {seed}, after "
            f"{len(search.returned)} probes: {type(error).__name__}: {error}"
        ) from error
    return ReplayRun(
        cell=cell.key,
        strategy=strategy_name,
        seed=seed,
        num_probes=probes,
        probes=tuple(search.returned),
        search_s=search.search_s,
    )


class _Search:
    """The event loop of one run: a heap of running probes by the moment at which they end."""

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
        """Asks and tells until the best is found, or the probes or the cell are used up."""
        self._fill()
        while self._running:
            ended_at_s, _, row = heapq.heappop(self._running)
            self._now_s = ended_at_s
            self.returned.append(self._probe(row))
            started = time.perf_counter()
            self._strategy.tell(row.layout, observation_of(row))
            self.search_s += time.perf_counter() - started
            if self.returned[-1].regret == 0.0:
                return  # nothing that comes after can be learnt from
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
            # Of probes that end at once the one that was asked for first is told first.
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
    """What a probe of the layout teaches; the objective is tokens/s a device."""
    if row.status == "out_of_memory":
        return INFEASIBLE
    if row.tokens_per_s is None:
        return FAILED
    return Observation.completed(
        row.tokens_per_s / row.layout.num_devices,
        step_time_s=row.step_time_s,
        peak_memory_bytes=row.peak_memory_bytes,
    )

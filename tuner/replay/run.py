"""Replayed searches: a strategy asks for layouts, and the rows of a table are the outcomes.

Probes run asynchronously as in a campaign: `pending` of them run at once, and the strategy is asked
for the next one when one ends. In simulated time a probe lasts ITERATIONS steps, so that fast
layouts end first. A failed probe lasts one step of the cell's median step time, because a layout
runs out of memory in its first iteration. The start-up time, equal for all layouts, is left out.

A `Disturbance` makes probes measure something else than the truth. A layout may be probed several
times; each probe counts, and a layout is ranked by the median of what its probes measured.
"""

from __future__ import annotations

import heapq
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Final

import scipy.linalg  # noqa: F401 - loads scipy's own BLAS, so that threadpool_limits applies to it
from threadpoolctl import threadpool_limits

from layout_tuner.predictions.belief.known_measurements import Knowledge
from layout_tuner.predictions.belief.observation import FAILED, INFEASIBLE, Observation
from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity, ProbeCosts
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.tables import CellKey, TableCell, TableRow
from layout_tuner.tuner.errors import ReplayFailedError, StrategyUnknownError
from layout_tuner.tuner.replay.cell_layouts import CellLayouts
from layout_tuner.tuner.strategies.ask_and_tell import AskLimits, LayoutSearch
from layout_tuner.tuner.strategies.registry import STRATEGIES, make_strategy
from layout_tuner.tuner.strategies.search_problem import SearchProblem

ITERATIONS: Final = 10
"""Iterations of a probe, as in arXiv:2312.12705 and in campaigns."""
_STEPS_ALONE: Final = ProbeCosts(start_s=0.0, warmup=0, iterations=ITERATIONS)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeConditions:
    """What one probe met on the machine."""

    slowdown: float = 1.0
    """Measured step time over the true one."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes that it ran on, if the strategy is to learn them."""


Disturbance = Callable[[TableRow, int, int], ProbeConditions]
"""Conditions of a probe of a row, by the search's seed and the number of the ask (from 0 on)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedProbe:
    """One probe, answered from the table."""

    layout: Layout
    regret: float | None
    """Share of the cell's best throughput a device that is lost with this layout; None: it did not
    complete. This is the true throughput, also where a disturbance changed the measured one."""
    leader_regret: float | None
    """True regret of the layout that is ranked first after this probe; None: none completed yet."""
    ended_at_s: float
    """Simulated seconds since the search began."""
    node_seconds: float
    """Simulated cost: the probe's seconds times its nodes."""
    step_time_s: float | None = None
    """True seconds of a step; None: it did not complete."""
    fidelity: Fidelity | None = None
    """The part of the layout that ran, as a cheap probe, which has no regret; None: all of it."""
    conditions: ProbeConditions = field(default_factory=ProbeConditions)
    """What it met on the machine."""
    prediction: Prediction | None = None
    """What the strategy predicted when it proposed the layout; None: it does not predict."""
    possible_improvement: float | None = None
    """What the strategy expected of the rest after this probe, if the task asked for that."""


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
        """Number of probes until the layout ranked first is truly within `share` of the best.

        None: it never is.
        """
        for count, probe in enumerate(self.probes, 1):
            if is_within(probe.leader_regret, share):
                return count
        return None

    def regret_after(self, num_probes: int) -> float:
        """Regret of the layout ranked first after so many probes; 1 while none completed."""
        last = self.probes[:num_probes][-1:]
        return 1.0 if not last or last[0].leader_regret is None else last[0].leader_regret

    def failed_within(self, num_probes: int) -> int:
        """How many of the first probes did not complete."""
        return sum(probe.step_time_s is None for probe in self.probes[:num_probes])


def is_within(regret: float | None, share: float) -> bool:
    """Whether a regret is at most a share; None, of nothing that completed, is not."""
    # Rounded, so that a layout exactly 5 % below the best is within 5 %.
    return regret is not None and round(regret, 9) <= share


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
    disturbance: Disturbance | None = None
    """What probes meet on the machine; without one they measure the truth."""
    stop_within: float | None = 0.0
    """The search ends when the layout that is ranked first is within this share of the best, truly
    and as measured; None: it uses all probes."""
    parts: Callable[[Layout, Fidelity], TableRow] | None = None
    """The truth of cheap probes, which run a part of a layout; None: every probe is a full one."""
    costs: ProbeCosts | None = None
    """What probes cost beside their timed steps; None: nothing. Needed for cheap probes."""
    budget_node_s: float | None = None
    """Node-seconds after which no probe starts; None: their number alone bounds the search."""
    expects: bool = False
    """Whether to ask the strategy after every probe what improvement it expects of the rest."""

    def run(self) -> ReplayRun:
        """Searches the cell until the layout that is ranked first is within `stop_within`.

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
            self.strategy,
            problem_of(cell, layouts, self.knowledge, costs=self.costs if self.parts else None),
            seed=self.seed,
        )
        search = _Search(self, layouts, strategy)
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


def problem_of(
    cell: TableCell, layouts: CellLayouts, knowledge: Knowledge, *, costs: ProbeCosts | None = None
) -> SearchProblem:
    return SearchProblem(
        layouts=layouts,
        model=cell.model,
        cluster=cell.cluster,
        software=cell.key.software,
        knowledge=knowledge,
        costs=costs,
        knobs=cell.job.knobs,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Probe:
    """A probe that runs."""

    row: TableRow
    """The truth of what runs."""
    layout: Layout
    fidelity: Fidelity | None
    """The part of it that runs; None: all of it."""
    conditions: ProbeConditions
    prediction: Prediction | None

    @property
    def measured(self) -> TableRow:
        slowdown = self.conditions.slowdown
        if self.row.step_time_s is None or self.row.tokens_per_s is None:
            return self.row
        return replace(
            self.row,
            step_time_s=self.row.step_time_s * slowdown,
            tokens_per_s=self.row.tokens_per_s / slowdown,
        )


class _Search:
    """The event loop of one search: a heap of running probes, sorted by their ends."""

    def __init__(self, task: ReplayTask, layouts: CellLayouts, strategy: LayoutSearch) -> None:
        completed = [row for row in layouts.truth if row.step_time_s and row.tokens_per_s]
        self.returned: list[ReplayedProbe] = []
        self.search_s = 0.0
        self._task = task
        self._layouts = layouts
        self._strategy = strategy
        self._num_asked = 0
        self._best = max(_rate(row) for row in completed)
        self._failed_s = statistics.median(row.step_time_s or 0.0 for row in completed)
        self._running: list[tuple[float, int, _Probe]] = []
        self._now_s = 0.0
        self._measured: dict[Layout, list[float]] = {}
        """Tokens/s a device of every completed probe, by layout."""

    def run(self) -> None:
        """Asks and tells until the search reached its goal, or no probe or no layout is left."""
        within = self._task.stop_within
        self._fill()
        while self._running:
            self._now_s, _, probe = heapq.heappop(self._running)
            self.returned.append(self._end(probe))
            if within is not None and self._has_settled(within):
                return
            self._fill()

    def _has_settled(self, share: float) -> bool:
        """Whether the layout ranked first is within the share, truly and as measured.

        A good layout that was measured slow may lead only until another one has been probed.
        """
        leader = self._leader()
        if leader is None or not is_within(self._regret(leader), share):
            return False
        return is_within(1 - statistics.median(self._measured[leader]) / self._best, share)

    def _fill(self) -> None:
        task = self._task
        while self._num_asked < task.probes and len(self._running) < task.pending:
            started = time.perf_counter()
            left_node_s = None
            if task.budget_node_s is not None:
                spent = sum(probe.node_seconds for probe in self.returned)
                left_node_s = task.budget_node_s - spent
                if left_node_s <= 0:
                    return
            layout = self._strategy.ask(AskLimits(left_node_s=left_node_s))
            self.search_s += time.perf_counter() - started
            if layout is None:
                return
            fidelity = self._strategy.fidelity(layout)
            row = self._row(layout)
            if fidelity is not None and task.parts is not None:
                row = task.parts(layout, fidelity)
            conditions = ProbeConditions()
            if task.disturbance is not None:
                conditions = task.disturbance(row, task.seed, self._num_asked)
            prediction = self._strategy.predict(layout)
            probe = _Probe(
                row=row,
                layout=layout,
                fidelity=fidelity,
                conditions=conditions,
                prediction=prediction,
            )
            ends_at_s = self._now_s + self._duration_s(probe)
            # Of probes that end at the same time, the one that started first is reported first.
            heapq.heappush(self._running, (ends_at_s, self._num_asked, probe))
            self._num_asked += 1

    def _duration_s(self, probe: _Probe) -> float:
        costs = self._task.costs or _STEPS_ALONE
        step_s, fidelity = probe.measured.step_time_s, probe.fidelity
        if step_s is None:
            # A part of the micro-batches fails in that part of the time.
            whole = probe.layout.num_microbatches
            run = fidelity.num_microbatches if fidelity is not None else whole
            return costs.start_s + self._failed_s * run / whole
        return costs.node_s(1, step_s, is_cheap=fidelity is not None)

    def _end(self, probe: _Probe) -> ReplayedProbe:
        """Tells the strategy what the probe measured; returns the record of it."""
        measured, layout = probe.measured, probe.layout
        is_full = probe.fidelity is None
        if is_full and measured.tokens_per_s is not None:
            self._measured.setdefault(layout, []).append(_rate(measured))
        observed = replace(observation_of(measured), nodes=probe.conditions.nodes)
        started = time.perf_counter()
        if probe.fidelity and not probe.fidelity.keeps_memory(self._task.cell.model):
            observed = replace(observed, peak_memory_bytes=None)
        self._strategy.tell(layout, observed, fidelity=probe.fidelity)
        self.search_s += time.perf_counter() - started
        leader = self._leader()
        expected = self._strategy.possible_improvement() if self._task.expects else None
        return ReplayedProbe(
            layout=layout,
            regret=self._regret(layout) if is_full else None,
            fidelity=probe.fidelity,
            leader_regret=None if leader is None else self._regret(leader),
            ended_at_s=self._now_s,
            node_seconds=self._duration_s(probe) * probe.row.layout.num_nodes,
            step_time_s=probe.row.step_time_s,
            conditions=probe.conditions,
            prediction=probe.prediction,
            possible_improvement=expected,
        )

    def _leader(self) -> Layout | None:
        """The layout that a leaderboard of the measurements ranks first."""
        medians = {layout: statistics.median(rates) for layout, rates in self._measured.items()}
        return max(medians, key=lambda layout: medians[layout], default=None)

    def _regret(self, layout: Layout) -> float | None:
        row = self._row(layout)
        return None if row.tokens_per_s is None else (self._best - _rate(row)) / self._best

    def _row(self, layout: Layout) -> TableRow:
        index = self._layouts.index_of(layout)
        assert index is not None, f"the strategy asked for {layout.key}, outside of the cell"
        return self._layouts.truth[index]


def _rate(row: TableRow) -> float:
    """Tokens/s a device: layouts of one cell may be on different numbers of nodes."""
    return (row.tokens_per_s or 0.0) / row.layout.num_devices


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
        """Checks the strategies before the first search; StrategyUnknownError for another name."""
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
    """Runs the tasks in `jobs` processes, in order; ReplayFailedError at the first that fails."""
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

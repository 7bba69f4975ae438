"""The searches of `bench_search`: which cells, how many seeds, how many pending."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final

from layout_tuner.search_spaces.tables import (
    MeasurementTable,
    TableCell,
    TableInvalidError,
    read_table,
)
from layout_tuner.tuner.replay.run import ReplayRun, ReplayTask, replay_all
from layout_tuner.workers.simulation.scenarios import simulated_table

PROBES: Final = 60
STRESS: Final = "stress-22b"
SIMULATED: Final = {"stress": STRESS, "events": "h100-8b"}
"""Scenarios by name of the landscape. Both are walks through the events of a step, which share no
formula with the estimates; of `stress` every constant is far off, with a distortion on top."""
STRESS_PENDING: Final = 8
MANY_CELLS: Final = 12
"""A table of more cells than this is searched with fewer seeds: as many runs in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How many searches are run."""

    seeds: int = 20
    """Seeds of a cell, and stress landscapes."""
    jobs: int = 1
    """Searches that run side by side, each in a process."""

    def seeds_of(self, num_cells: int) -> int:
        """Seeds a cell for a table of so many."""
        return max(1, self.seeds * MANY_CELLS // max(num_cells, MANY_CELLS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Landscape:
    """Some cells, and the searches of them."""

    name: str
    """As results and plots call it."""
    about: str
    """A line for people."""
    cells: tuple[TableCell, ...]
    runs: tuple[ReplayRun, ...]

    def unit_costs(self) -> dict[str, float]:
        """By cell, the node-seconds of a probe of its best layout: what costs are counted in."""
        units: dict[str, float] = {}
        for run in self.runs:
            for probe in run.probes:
                if probe.regret == 0.0:
                    units[str(run.cell)] = probe.node_seconds
        return units


def read_tables(folder: Path) -> Iterator[tuple[Path, MeasurementTable]]:
    """The measurement tables of a folder; says which files are none."""
    for path in sorted(folder.glob("*.csv")):
        try:
            yield path, read_table(path)
        except TableInvalidError as error:
            print(f"left out: {str(error)[:160]}")


def search_table(
    name: str,
    about: str,
    cells: Sequence[TableCell],
    strategies: Sequence[str],
    effort: Effort,
) -> Landscape:
    """Every strategy on every cell that can be searched, cold, one probe at a time."""
    searched = tuple(searchable(cells))
    seeds = range(effort.seeds_of(len(searched)))
    tasks = [task for strategy in strategies for task in tasks_of(searched, strategy, seeds)]
    runs = tuple(replay_all(tasks, jobs=effort.jobs))
    return Landscape(name=name, about=about, cells=searched, runs=runs)


def searchable(cells: Iterable[TableCell]) -> Iterator[TableCell]:
    """The cells with a measured layout and one measurement of each; says which others there are."""
    for cell in cells:
        if any(cell.differences().values()):
            print(f"left out: cell {cell.key}: rows of one layout differ in a column of its table")
        elif cell.num_completed:
            yield cell


def tasks_of(
    cells: Sequence[TableCell], strategy: str, seeds: Iterable[int], **settings: Any
) -> list[ReplayTask]:
    """A search of every cell with every seed: cold, one probe at a time unless settings differ."""
    chosen = {"pending": 1, "probes": PROBES} | settings
    return [
        ReplayTask(cell=cell, strategy=strategy, seed=seed, **chosen)
        for cell, seed in product(cells, seeds)
    ]


def search_simulated(name: str, strategies: Sequence[str], effort: Effort) -> Landscape:
    """A simulated landscape: each seed has a truth of its own; eight probes at a time."""
    scenario = SIMULATED[name]
    cells = simulated_cells(scenario, effort.seeds)
    tasks = [
        task
        for strategy in strategies
        for seed, cell in enumerate(cells)
        for task in tasks_of([cell], strategy, [seed], pending=STRESS_PENDING)
    ]
    return Landscape(
        name=name,
        about=f"{len(cells)} landscapes of `{scenario}`, {STRESS_PENDING} pending",
        cells=cells,
        runs=tuple(replay_all(tasks, jobs=effort.jobs)),
    )


def simulated_cells(scenario: str, number: int) -> tuple[TableCell, ...]:
    """The cells of a scenario for the seeds from 0 on."""
    return tuple(simulated_table(scenario, seed).cells[0] for seed in range(number))

"""Guided searches that start from measurements of other cells, beside the same ones cold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.results_file import table
from benchmarks.search.search_cells import GROUPS, HALVES, CellGroup, by_cell, probes_needed
from benchmarks.search.search_conditions import Tables
from benchmarks.search.search_record import Part
from benchmarks.search.search_runs import Effort, tasks_of
from layout_tuner.predictions.belief.known_measurements import Knowledge, knowledge_of
from layout_tuner.search_spaces.tables import TableCell
from layout_tuner.tuner.replay.run import ReplayRun, replay_all

_SEEDS: Final = 3
"""Seeds a cell: what is known decides the first probes, and the fit to it takes seconds."""
_SMALLER, _LARGER = HALVES
_SMALL: Final = GROUPS[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Start:
    """Searches of some cells that know other cells of a table."""

    searched: CellGroup
    known_from: str
    """What is known, in words."""
    is_known: Callable[[TableCell, TableCell], bool]
    """Whether the second cell is known where the first is searched."""


def _others(searched: TableCell, known: TableCell) -> bool:
    return known.key != searched.key


def _on_fewer_devices(searched: TableCell, known: TableCell) -> bool:
    return known.key.num_devices < searched.key.num_devices


def _of_other_models(searched: TableCell, known: TableCell) -> bool:
    return known.key.model != searched.key.model


_STARTS: Final = tuple(
    _Start(searched=group, known_from=words, is_known=is_known)
    for group in (_SMALLER, _LARGER, _SMALL)
    for words, is_known in (
        ("other models", _of_other_models),
        ("all other cells", _others),
        ("all cells on fewer devices", _on_fewer_devices),
    )
)


def known_cells(tables: Tables, effort: Effort) -> Part:
    """First regret and probes needed, by what is known; the worst cell beside the mean."""
    rows = []
    for start in _STARTS:
        cells = start.searched.of(tables)
        table_cells = tables[start.searched.table].cells if cells else ()
        seeds = range(min(_SEEDS, effort.seeds_of(len(cells))))
        runs: dict[str, list[ReplayRun]] = {"cold": [], start.known_from: []}
        for cell in cells:
            known = knowledge_of(each for each in table_cells if start.is_known(cell, each))
            if not known:
                continue  # nothing was measured on fewer devices
            for words, knowledge in (("cold", Knowledge()), (start.known_from, known)):
                tasks = tasks_of([cell], "guided", seeds, knowledge=knowledge)
                runs[words] += replay_all(tasks, jobs=effort.jobs)
        if runs["cold"]:
            rows.append(_row(f"{start.searched.title}, {start.known_from}", *runs.values()))
    header = (
        "searched, known",
        "cells",
        "runs",
        "first regret, mean",
        "worst cell",
        "mean probes to 5 %",
        "worst cell",
        "to 2 %",
        "worst cell",
    )
    text = f"Cold, and then with what is known.\n\n{table(header, rows)}"
    return Part(title="known-cells", text=text)


def _row(words: str, cold: Sequence[ReplayRun], known: Sequence[ReplayRun]) -> tuple[str, ...]:
    figures = [", ".join(pair) for pair in zip(_figures(cold), _figures(known), strict=True)]
    return (words, f"{len(by_cell(cold))}", f"{len(cold)}", *figures)


def _figures(runs: Sequence[ReplayRun]) -> list[str]:
    cells = list(by_cell(runs).values())
    first = [float(np.mean([run.regret_after(1) for run in own])) for own in cells]
    figures = [f"{np.mean(first):.1%}", f"{max(first):.1%}"]
    for share in (0.05, 0.02):
        means = [float(np.mean([probes_needed(run, share) for run in own])) for own in cells]
        figures += [f"{np.mean(means):.2f}", f"{max(means):.1f}"]
    return figures

"""Figures of guided searches by cell, where pooled ones hide the worst."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from benchmarks.results_file import table
from layout_tuner.cli.predictions.replay_report import summarize
from layout_tuner.search_spaces.tables import CellKey, MeasurementTable, TableCell
from layout_tuner.search_spaces.tables.selection import CellFilter, select
from layout_tuner.tuner.replay.run import ReplayRun

HEADER: Final = (
    "cell",
    "runs",
    "mean probes to 5 %",
    "to 2 %",
    "most to 5 %",
    "failed to 5 %, a run",
    "regret after 1: median",
    "mean",
)
MOST_SHOWN: Final = 20
"""Of more cells than this only the worst are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellGroup:
    """Some cells of a table that are judged together."""

    title: str
    table: str
    cells: str = ""
    """A `CellFilter` in words."""

    def of(self, tables: Mapping[str, MeasurementTable]) -> tuple[TableCell, ...]:
        """The cells in which something completed; none if the table is not there."""
        if self.table not in tables:
            return ()
        chosen = select(tables[self.table], (CellFilter.read(self.cells),))
        return tuple(cell for cell in chosen if cell.num_completed)


HALVES: Final = (
    CellGroup(title="nanotron 3B", table="nanotron_h100", cells="model=llama-3B"),
    CellGroup(title="nanotron 8B", table="nanotron_h100", cells="model=llama-8B"),
)
"""Constants are chosen on one half and judged on the other."""

GROUPS: Final = (
    *HALVES,
    CellGroup(title="vtrain_a100_multi", table="vtrain_a100_multi"),
    CellGroup(title="vtrain_a100_small", table="vtrain_a100_small"),
)


def by_cell(runs: Sequence[ReplayRun]) -> dict[CellKey, list[ReplayRun]]:
    """The runs of each cell, in the given order."""
    groups: dict[CellKey, list[ReplayRun]] = {}
    for run in runs:
        groups.setdefault(run.cell, []).append(run)
    return groups


def probes_needed(run: ReplayRun, share: float) -> int:
    """Probes until the leader is within the share; a run that misses counts one too many."""
    return run.probes_to(share) or run.num_probes + 1


def failed_before(run: ReplayRun, share: float) -> int:
    """Failed probes of a run until the leader is within the share."""
    return run.failed_within(run.probes_to(share) or len(run.probes))


def cells_table(runs: Sequence[ReplayRun]) -> str:
    """A row a cell; of many the worst, by the mean probes to 5 %."""
    cells = by_cell(runs)
    shown = list(cells)
    if len(shown) > MOST_SHOWN:
        means = {key: np.mean([probes_needed(run, 0.05) for run in cells[key]]) for key in shown}
        shown = sorted(shown, key=lambda key: -means[key])[:MOST_SHOWN]
    left_out = len(cells) - len(shown)
    note = f"\n\nThe {MOST_SHOWN} worst cells; {left_out} more are not shown." if left_out else ""
    return table(HEADER, [_row(key, cells[key]) for key in shown]) + note


def _row(key: CellKey, runs: Sequence[ReplayRun]) -> tuple[str, ...]:
    to = summarize(runs)["probes_to"]
    first = [run.regret_after(1) for run in runs]
    simulated = f", {key.source}" if key.source.startswith("simulated") else ""
    return (
        f"{key.model} on {key.num_devices}, batch {key.global_batch_size}{simulated}",
        f"{len(runs)}",
        f"{to['0.05']['mean']:.1f}",
        f"{to['0.02']['mean']:.1f}",
        f"{max(probes_needed(run, 0.05) for run in runs)}",
        f"{np.mean([failed_before(run, 0.05) for run in runs]):.2f}",
        f"{np.median(first):.1%}",
        f"{np.mean(first):.1%}",
    )

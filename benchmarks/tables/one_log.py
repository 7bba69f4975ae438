"""What one log of a job is worth: errors of predictions with one measured row, and without.

Run as `make bench-logs TABLES=DIR`, or `python -m benchmarks.tables.one_log --tables DIR`; it takes
two minutes. In each cell of each table every row in turn is the job whose log is known, and the
others are judged. `--record` writes the section "One log" of `benchmarks/RESULTS.md`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.bench_tables import UNTIMED
from benchmarks.results_file import describe_machine, record, table
from benchmarks.tables.judged_tables import LACKS, table_cells
from layout_tuner.array_types import Floats
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.known_measurements import Sample
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.tables import TableCell, TableInvalidError
from layout_tuner.units import NORMAL_95

ASKED: Final = 0.6
"""Mean error with one log, over that without, at most."""
_MOST: Final = 40
"""Rows of a cell that are the log in turn: of larger cells evenly spaced ones."""
NEAR_BEST: Final = 1.5
"""Rows up to so many times slower than the best of their cell are like jobs that people run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellScore:
    """Mean errors of a cell's rows, in logarithms of the step time; each of shape [logs]."""

    cold: Floats
    """Of the other rows, without a log."""
    warm: Floats
    """With the log."""
    cold_held: Floats
    """Share of them that their 95 % interval holds."""
    warm_held: Floats
    cold_width: Floats
    """Mean width of the intervals, in logarithms."""
    warm_width: Floats
    best_factor: Floats
    """Without a log, times the one factor that is best for all rows of the cell."""
    near_best: Floats
    """1: the log is that of a row near the best."""


def judged_cell(cell: TableCell, left_out: frozenset[int]) -> CellScore | None:
    """Every row in turn as the log; None: the cell has fewer than two rows with a step time."""
    rows = [row for row in cell.merged if row.step_time_s and row.number not in left_out]
    if len(rows) < 2:
        return None
    software, columns = cell.key.software, LayoutColumns.of_each([row.layout for row in rows])
    measured = np.log([row.step_time_s for row in rows])

    def errors(calibration: TimeCalibration) -> tuple[Floats, Floats]:
        mean, deviation = calibration.predict(columns, cell.model, cell.cluster, software=software)
        return mean - measured, NORMAL_95 * deviation

    cold, cold_width = errors(TimeCalibration())
    best_factor = np.abs(cold - np.median(cold)).mean()
    found = []
    for log in range(0, len(rows), -(-len(rows) // _MOST)):
        sample = Sample(
            model=cell.model,
            cluster=cell.cluster,
            layout=rows[log].layout,
            state="completed",
            step_time_s=rows[log].step_time_s,
            software=software,
        )
        warm, warm_width = errors(TimeCalibration.fit([sample]))
        others = np.arange(len(rows)) != log
        pairs = ((cold, cold_width), (warm, warm_width))
        means = [np.abs(error[others]).mean() for error, _ in pairs]
        held = [(np.abs(error) <= width)[others].mean() for error, width in pairs]
        widths = [2 * width[others].mean() for _, width in pairs]
        is_near = measured[log] <= measured.min() + np.log(NEAR_BEST)
        found.append((*means, *held, *widths, best_factor, float(is_near)))
    names = [each.name for each in fields(CellScore)]
    return CellScore(**dict(zip(names, np.array(found).T, strict=True)))


def judged_table(path: Path) -> list[CellScore]:
    """The cells of a table; TableInvalidError: it is no measurement table."""
    found = []
    for cell, texts in table_cells(path.read_text()):
        left_out = frozenset(at for at, text in enumerate(texts, 1) if text.get(LACKS))
        if (score := judged_cell(cell, left_out)) is not None:
            found.append(score)
    return found


def mean_of(cells: Sequence[CellScore], name: str, *, near: bool = False) -> float:
    """The mean over cells of the mean over logs; near: over the logs of rows near the best."""
    means = [
        values[each.near_best > 0].mean() if near else values.mean()
        for each in cells
        if (values := getattr(each, name)) is not None and (not near or each.near_best.any())
    ]
    return float(np.mean(means))


def _row(name: str, cells: Sequence[CellScore]) -> tuple[str, ...]:
    cold, warm = mean_of(cells, "cold"), mean_of(cells, "warm")
    near = mean_of(cells, "warm", near=True) / mean_of(cells, "cold", near=True)
    return (
        name,
        f"{len(cells)}",
        f"{sum(len(each.cold) for each in cells)}",
        f"{cold:.1%}",
        f"{warm:.1%}",
        f"{warm / cold:.2f}",
        f"{near:.2f}",
        f"{mean_of(cells, 'best_factor') / cold:.2f}",
        f"{mean_of(cells, 'cold_held'):.0%}, {mean_of(cells, 'warm_held'):.0%}",
        f"{np.exp(mean_of(cells, 'cold_width')):.2f}, {np.exp(mean_of(cells, 'warm_width')):.2f}",
    )


def rows_of(folder: Path, only: Sequence[str]) -> Iterator[tuple[str, list[CellScore]]]:
    """Name and cells of each table of a folder that has cells with several step times."""
    for path in sorted(folder.glob("*.csv")):
        if path.stem in UNTIMED or (only and path.stem not in only):
            continue
        try:
            cells = judged_table(path)
        except TableInvalidError:
            continue
        if cells:
            yield path.stem, cells


def main() -> None:
    """Prints the table, and records it where that is asked for."""
    asked = _arguments()
    found = dict(rows_of(asked.tables, asked.only.split(",") if asked.only else ()))
    rows = [_row(name, cells) for name, cells in found.items()]
    every = [cell for cells in found.values() for cell in cells]
    rows.append(_row("all cells", every))
    cold, *others = (
        sum(mean_of(cells, name) for cells in found.values())
        for name in ("cold", "warm", "best_factor")
    )
    text = _section(rows, *(each / cold for each in others))
    print(text)
    if asked.record:
        record("One log", text)


def _section(rows: list[tuple[str, ...]], ratio: float, best_factor: float) -> str:
    heads = (
        *("table", "cells", "logs", "without", "with", "ratio"),
        *("log near the best", "best factor", "95 % hold", "width"),
    )
    is_reached = "reached" if ratio <= ASKED else "**not reached**"
    return f"""`make bench-logs TABLES=DIR`; {describe_machine("numpy")}. Mean size of the logarithm of predicted over measured step time, of the other rows of a cell (one model, machine, number of devices and batch), without a log and with that of one row; every row in turn, of cells with more than {_MOST} rows every nth. Means over logs, then over cells. *Log near the best*: the ratio where the log is of a row at most {NEAR_BEST} times slower than the best of its cell. *Best factor*: the ratio with the one factor that is best for all rows of the cell, which no single log can know. The last two columns: without and with. Mean over the tables: {ratio:.2f} times; asked: at most {ASKED} ({is_reached}). With the best factor of each cell it is {best_factor:.2f}: what remains is errors of single layouts.

{table(heads, rows)}
"""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", type=Path, required=True, help="folder of tables")
    parser.add_argument("--only", default="", metavar="TABLE[,TABLE...]", help="only these tables")
    parser.add_argument("--record", action="store_true", help="write RESULTS.md")
    asked = parser.parse_args()
    if not asked.tables.is_dir():
        parser.error(f"--tables {asked.tables} is no folder")
    return asked


if __name__ == "__main__":
    sys.exit(main())

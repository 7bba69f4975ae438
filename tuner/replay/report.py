"""What a replay found, as one JSON object and as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from search_spaces.tables import TableCell
from tuner.replay.many import ReplayPlan, by_strategy
from tuner.replay.run import ReplayRun
from tuner.replay.statistics import CHECKPOINTS, TARGETS, summarize


def replay_report(table: str, plan: ReplayPlan, runs: Sequence[ReplayRun]) -> dict[str, Any]:
    """The whole report: every strategy over all cells, then cell by cell."""
    return {
        "table": table,
        "settings": {
            "seeds": plan.num_seeds,
            "pending": plan.pending,
            "probes": plan.probes,
            "calibrated_from": 0 if plan.knowledge is None else len(plan.knowledge),
        },
        "strategies": _summaries(runs),
        "cells": [_cell_report(cell, runs) for cell in plan.cells],
    }


def _cell_report(cell: TableCell, runs: Sequence[ReplayRun]) -> dict[str, Any]:
    rows = cell.merged
    rates = {row.layout: row.tokens_per_s for row in rows if row.tokens_per_s is not None}
    best = max(rates, key=lambda layout: rates[layout])
    return {
        "name": str(cell.key),
        "cell": asdict(cell.key),
        "num_layouts": len(rows),
        "num_completed": len(rates),
        "num_within": {
            f"{target:g}": sum(rate >= (1 - target) * rates[best] for rate in rates.values())
            for target in TARGETS
        },
        "best": {"layout": best.to_mapping(), "tokens_per_s": rates[best]},
        "strategies": _summaries([run for run in runs if run.cell == cell.key]),
    }


def _summaries(runs: Sequence[ReplayRun]) -> dict[str, Any]:
    return {name: summarize(group) for name, group in by_strategy(runs).items()}


def print_replay(report: dict[str, Any], console: Console) -> None:
    """All cells by strategy, then the median probes to 5 % cell by cell."""
    settings = report["settings"]
    overall = _table(
        f"{len(report['cells'])} cells, {settings['seeds']} seeds, {settings['pending']} pending, "
        f"{settings['probes']} probes",
        ("strategy", *_OVERALL),
    )
    for name, summary in report["strategies"].items():
        overall.add_row(name, *_overall_cells(summary))
    console.print(overall)
    names = list(report["strategies"])
    by_cell = _table(
        "median probes to 5 % / 2 %, by cell",
        ("cell", ">layouts", ">ran", *(f">{n}" for n in names)),
    )
    for cell in report["cells"]:
        medians = (_medians(cell["strategies"][name]) for name in names)
        by_cell.add_row(
            cell["name"], f"{cell['num_layouts']}", f"{cell['num_completed']}", *medians
        )
    console.print(by_cell)


_OVERALL: Final = (
    ">to 5 %",
    ">to 2 %",
    ">to best",
    ">mean to 5 %",
    ">reached 5 %",
    ">failed to 5 %",
    f">regret after {CHECKPOINTS[0]}",
    *(f">{n}" for n in CHECKPOINTS[1:]),
    ">search s/probe",
)


def _overall_cells(summary: dict[str, Any]) -> list[str]:
    to = summary["probes_to"]
    return [
        *(f"{to[target]['median']:g}" for target in ("0.05", "0.02", "0")),
        f"{to['0.05']['mean']:.1f}",
        f"{to['0.05']['reached']:.0%}",
        f"{summary['failed_share_to']['0.05']:.1%}",
        *(f"{regret:.1%}" for regret in summary["regret_after"].values()),
        f"{summary['seconds_per_probe']:.3f}",
    ]


def _medians(summary: dict[str, Any]) -> str:
    to = summary["probes_to"]
    return f"{to['0.05']['median']:g} / {to['0.02']['median']:g}"


def print_estimates(report: dict[str, Any], console: Console) -> None:
    """Time and memory over all cells, then cell by cell."""
    time, memory = report["estimates"]["time"], report["estimates"]["memory"]
    table = _table("estimates against measurements", ("what", ">value"))
    table.add_row("step time, median error", _share(time["median_error"]))
    table.add_row("step time, mean error", _share(time["mean_error"]))
    table.add_row("Kendall tau within cells, mean", _plain(time["kendall_tau"]))
    table.add_row(
        "regret of the first choice, mean over cells", _share(time["first_choice_regret"])
    )
    table.add_row("peak memory, median error", _share(memory["median_error"]))
    table.add_row("peak memory, mean error", _share(memory["mean_error"]))
    table.add_row("accepted although it failed", _share(memory["false_accepts"]))
    table.add_row("rejected although it ran", _share(memory["false_rejects"]))
    console.print(table)
    cells = _table(
        "by cell",
        (
            "cell",
            ">ran",
            ">mean error",
            ">tau",
            ">first choice",
            ">false accepts",
            ">false rejects",
        ),
    )
    for cell in report["cells"]:
        time, memory = cell["time"], cell["memory"]
        cells.add_row(
            cell["name"],
            f"{cell['num_completed']}",
            _share(time["mean_error"]),
            _plain(time["kendall_tau"]),
            _share(time["first_choice_regret"]),
            _share(memory["false_accepts"]),
            _share(memory["false_rejects"]),
        )
    console.print(cells)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _table(title: str, columns: Sequence[str]) -> Table:
    """A column whose name begins with ">" stands to the right."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        justify = "right" if column.startswith(">") else "left"
        table.add_column(column.removeprefix(">"), justify=justify)  # type: ignore[arg-type]
    return table

"""The result of a replay, as one JSON object and as tables of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

import click
import numpy as np

from layout_tuner.search_spaces.tables import TableCell
from layout_tuner.terminal.text_table import print_table
from layout_tuner.tuner.replay.run import ReplayPlan, ReplayRun, by_strategy

TARGETS: Final = (0.05, 0.02, 0.0)
"""Shares of the best throughput within which a layout counts as found."""
CHECKPOINTS: Final = (1, 3, 5, 10, 20)
"""Numbers of probes after which the regret is reported."""

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


def replay_report(table: str, plan: ReplayPlan, runs: Sequence[ReplayRun]) -> dict[str, Any]:
    """The whole report: every strategy over all cells, then cell by cell."""
    return {
        "table": table,
        "settings": {
            "seeds": plan.num_seeds,
            "pending": plan.pending,
            "probes": plan.probes,
            "calibrated_from": len(plan.knowledge),
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


def print_replay(report: dict[str, Any]) -> None:
    """All cells by strategy, then the median probes to 5 % cell by cell."""
    settings = report["settings"]
    print_table(
        ("strategy", *_OVERALL),
        [(name, *_overall_cells(summary)) for name, summary in report["strategies"].items()],
        f"{len(report['cells'])} cells, {settings['seeds']} seeds, {settings['pending']} pending, "
        f"{settings['probes']} probes",
    )
    click.echo()
    names = list(report["strategies"])
    print_table(
        ("cell", ">layouts", ">ran", *(f">{n}" for n in names)),
        [
            (
                cell["name"],
                f"{cell['num_layouts']}",
                f"{cell['num_completed']}",
                *(_medians(cell["strategies"][name]) for name in names),
            )
            for cell in report["cells"]
        ],
        "median probes to 5 % / 2 %, by cell",
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


def print_estimates(report: dict[str, Any]) -> None:
    """Time and memory over all cells, then cell by cell."""
    time, memory = report["estimates"]["time"], report["estimates"]["memory"]
    print_table(
        ("what", ">value"),
        [
            ("step time, median error", _share(time["median_error"])),
            ("step time, mean error", _share(time["mean_error"])),
            ("Kendall tau within cells, mean", _plain(time["kendall_tau"])),
            ("regret of the first choice, mean over cells", _share(time["first_choice_regret"])),
            ("peak memory, median error", _share(memory["median_error"])),
            ("peak memory, mean error", _share(memory["mean_error"])),
            ("accepted although it failed", _share(memory["false_accepts"])),
            ("rejected although it ran", _share(memory["false_rejects"])),
        ],
        "estimates against measurements",
    )
    click.echo()
    print_table(
        (
            "cell",
            ">ran",
            ">mean error",
            ">tau",
            ">first choice",
            ">false accepts",
            ">false rejects",
        ),
        [_estimates_cells(cell) for cell in report["cells"]],
        "by cell",
    )


def _estimates_cells(cell: dict[str, Any]) -> tuple[str, ...]:
    time, memory = cell["time"], cell["memory"]
    return (
        cell["name"],
        f"{cell['num_completed']}",
        _share(time["mean_error"]),
        _plain(time["kendall_tau"]),
        _share(time["first_choice_regret"]),
        _share(memory["false_accepts"]),
        _share(memory["false_rejects"]),
    )


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def summarize(runs: Sequence[ReplayRun]) -> dict[str, Any]:
    """The report of one strategy over some runs, as plain JSON values.

    - probes_to: probes until the first layout within each target. A run that does not reach the
      target counts one probe more than it was allowed; `reached` is the share of runs that reach
      it.
    - failed_probes: mean number of a run's probes that did not complete.
    - failed_share_to: for each target, the share of failed probes among all probes up to the first
      within the target (or all probes of a run that does not reach it).
    - regret_after, mean_regret_after: median and mean over runs, by number of probes.
    - seconds_per_probe: mean time of the strategy for one probe.
    """
    num_probes = sum(len(run.probes) for run in runs)
    after = {n: [run.regret_after(n) for run in runs] for n in CHECKPOINTS}
    return {
        "probes_to": {f"{target:g}": _probes_to(runs, target) for target in TARGETS},
        "failed_probes": float(np.mean([run.failed_within(len(run.probes)) for run in runs])),
        "failed_share_to": {f"{target:g}": _failed_share(runs, target) for target in TARGETS},
        "regret_after": {str(n): float(np.median(regrets)) for n, regrets in after.items()},
        "mean_regret_after": {str(n): float(np.mean(regrets)) for n, regrets in after.items()},
        "seconds_per_probe": sum(run.search_s for run in runs) / num_probes,
        "num_runs": len(runs),
    }


def _probes_to(runs: Sequence[ReplayRun], target: float) -> dict[str, float]:
    counts = [run.probes_to(target) for run in runs]
    needed = [run.num_probes + 1 if n is None else n for run, n in zip(runs, counts, strict=True)]
    low, median, high = np.percentile(needed, (25, 50, 75))
    return {
        "median": float(median),
        "mean": float(np.mean(needed)),
        "q25": float(low),
        "q75": float(high),
        "reached": sum(count is not None for count in counts) / len(runs),
    }


def _failed_share(runs: Sequence[ReplayRun], target: float) -> float:
    ends = [run.probes_to(target) or len(run.probes) for run in runs]
    failed = sum(run.failed_within(end) for run, end in zip(runs, ends, strict=True))
    return failed / sum(ends)

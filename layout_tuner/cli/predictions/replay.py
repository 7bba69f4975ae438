"""The command `layout-tuner replay`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layout_tuner.cli.options.prediction_options import (
    calibrate_from_option,
    cells_option,
    declared_knobs,
    knob_columns_option,
    knobs_file_option,
)
from layout_tuner.cli.options.refusals import refusals, refuse
from layout_tuner.process_resources import usable_cores, use_one_blas_thread

if TYPE_CHECKING:
    from layout_tuner.search_spaces.tables import MeasurementTable, TableCell


@click.command()
@click.argument("table", type=click.Path(path_type=Path))
@click.option(
    "--strategy",
    "strategies",
    default="guided,random",
    show_default=True,
    metavar="S[,S...]",
    help="What searches, each on every cell.",
)
@click.option("--seeds", type=click.IntRange(1, 10_000), default=20, show_default=True)
@click.option(
    "--pending",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Probes that run at once.",
)
@click.option(
    "--probes",
    type=click.IntRange(1, 100_000),
    default=60,
    show_default=True,
    help="Probes a search.",
)
@cells_option
@knob_columns_option
@knobs_file_option
@calibrate_from_option
@click.option("--estimates", is_flag=True, help="Judge the estimates alone: no search.")
@click.option(
    "--jobs",
    type=click.IntRange(1, 1024),
    help="Searches that run side by side, each in a process.  [default: one a core]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(
    table: Path,
    strategies: str,
    seeds: int,
    pending: int,
    probes: int,
    cells: tuple[str, ...],
    knob_columns: tuple[str, ...],
    knobs_file: Path | None,
    calibrate_from: tuple[str, ...],
    estimates: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Search recorded measurements instead of probing, and say how well strategies did.

    Every cell of the measurement table TABLE is searched on its own, with its rows as the only
    legal layouts and their measurements as the truth. Rows of one layout that differ in job knobs
    (--knob) are jobs of their own.
    """
    use_one_blas_thread()  # `jobs` says how many cores are busy
    # Imported here, so that `layout-tuner --help` starts fast.
    from layout_tuner.cli.live_output import work_line
    from layout_tuner.predictions.belief.known_measurements import (
        knowledge_of,
        read_calibrating_cells,
    )
    from layout_tuner.search_spaces.tables import read_table
    from layout_tuner.search_spaces.tables.knob_columns import TableKnobs
    from layout_tuner.search_spaces.tables.selection import CellFilter, select
    from layout_tuner.tuner.errors import StrategyUnknownError
    from layout_tuner.tuner.replay.run import ReplayPlan

    with refusals():
        with work_line(sys.stderr, ticks=True) as line:
            line.say(f"reading {table.name}")
            declared = None if knobs_file is None else declared_knobs(knobs_file)
            read = read_table(table, TableKnobs.read(knob_columns, declared))
        chosen = select(read, tuple(CellFilter.read(text) for text in cells))
        is_simulated = all(cell.key.is_simulated for cell in chosen)
        known = [
            cell
            for text in calibrate_from
            for cell in read_calibrating_cells(text, may_be_simulated=is_simulated)
        ]
        chosen, notes = _searchable(chosen, read)
        calibrating = {cell.key for cell in known}
        notes += [  # their figures are not a test
            f"calibrated from the very cell that is judged: {cell.key}"
            for cell in chosen
            if cell.key in calibrating
        ]
        if estimates:
            from layout_tuner.tuner.replay.judged_estimates import estimates_report

            with work_line(sys.stderr, ticks=True) as line:
                line.say("judging the estimates")
                report = estimates_report(str(table), chosen, knowledge_of(known))
        else:
            plan = ReplayPlan(
                cells=chosen,
                strategies=tuple(dict.fromkeys(filter(None, strategies.split(",")))),
                num_seeds=seeds,
                pending=pending,
                probes=probes,
                knowledge=knowledge_of(known),
            )
            try:
                plan.check()
            except StrategyUnknownError as error:
                refuse(f"--strategy: {error}")
            report = _search(table, plan, jobs or usable_cores())
    report["notes"] = [*notes, *report.get("notes", ())]
    _print(report, as_json=as_json, estimates=estimates)


def _searchable(
    chosen: tuple[TableCell, ...], table: MeasurementTable
) -> tuple[tuple[TableCell, ...], list[str]]:
    """The cells with a completed row; notes of the table and on cells that are left out."""
    from layout_tuner.tuner.errors import ReplayFailedError

    usable = tuple(cell for cell in chosen if cell.num_completed)
    if not usable:
        raise ReplayFailedError("no row of the selected cells is completed")
    left_out = [
        f"left out, because no row of it is completed: {cell.key}"
        for cell in chosen
        if not cell.num_completed
    ]
    return usable, [*table.notes, *left_out]


def _search(table: Path, plan: Any, jobs: int) -> dict[str, Any]:
    from layout_tuner.cli.live_output import work_line
    from layout_tuner.cli.predictions.replay_report import replay_report
    from layout_tuner.tuner.replay.run import replay_all

    tasks = plan.tasks()
    runs = []
    # The processes of the searches are spawned, so a thread may update the line.
    with work_line(sys.stderr, ticks=True) as line:
        line.say(f"searching: 0 of {len(tasks)} searches done")
        for run in replay_all(tasks, jobs=jobs):
            runs.append(run)
            line.say(f"searching: {len(runs)} of {len(tasks)} searches done")
    return replay_report(str(table), plan, runs)


def _print(report: dict[str, Any], *, as_json: bool, estimates: bool) -> None:
    if as_json:
        click.echo(json.dumps(report))
        return
    from layout_tuner.cli.predictions.replay_report import print_estimates, print_replay

    (print_estimates if estimates else print_replay)(report)
    for note in report["notes"]:
        click.echo(f"note: {note}", err=True)

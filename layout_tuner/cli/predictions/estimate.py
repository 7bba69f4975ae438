"""The command `layout-tuner estimate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

import click

from layout_tuner.cli.live_output import work_line
from layout_tuner.cli.options.command_options import stated
from layout_tuner.cli.options.job_options import job_options
from layout_tuner.cli.options.prediction_options import (
    calibrate_from_option,
    constants_dir_option,
    written_out,
)
from layout_tuner.cli.options.refusals import refusals, refuse, writing
from layout_tuner.cli.options.shared_options import MODEL_HELP, layout_options, seq_length_option
from layout_tuner.cli.options.software_option import software_option
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.terminal.plurals import counted
from layout_tuner.trainers.embedded import software_named

_WITH_A_TABLE: Final = ("table", "out", "software", "calibrate_from", "data_dir")
"""Options that a table may have; all others describe one layout."""


@click.command()
@click.option("--model", help=MODEL_HELP)
@seq_length_option
@click.option("--cluster", default="local-cpu", show_default=True, help="What it would run on.")
@layout_options
@software_option("layout-tuner; with --table what its source says")
@click.option(
    "--table",
    type=click.Path(path_type=Path),
    help="Instead of one layout: a measurement table, whose every row gets predicted columns.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Where that goes; by default stdout.")
@calibrate_from_option
@constants_dir_option
@click.option(
    "--all-terms",
    is_flag=True,
    help="Print every part of the step time; by default those below 1 % are added up.",
)
@job_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, all parts in it.")
def estimate(
    model: str | None,
    seq_length: int | None,
    cluster: str,
    software: str | None,
    table: Path | None,
    out: Path | None,
    calibrate_from: tuple[str, ...],
    data_dir: Path | None,
    all_terms: bool,
    job: TrainingJob | None,
    as_json: bool,
    **knobs: Any,
) -> None:
    """Predict throughput, step time and memory of one layout, without running it.

    With --table: of every row of a measurement table, whose own measurements are not looked at;
    --software then stands in place of what the table's source says.
    With --tokens: also the days of the training job.
    """
    if (model is None) == (table is None):
        refuse("say either --model, for one layout, or --table, for a table of them")
    if out is not None and table is None:
        refuse(f"--out {out} goes with --table; for one layout redirect the output")
    if table is not None:
        # A table says all else of each of its rows.
        names = (str(option.name) for option in click.get_current_context().command.params)
        for option in stated(*(name for name in names if name not in _WITH_A_TABLE)):
            refuse(f"{option} goes with --model; a table says it of each of its rows")
        _predict_table(table, software, calibrate_from, out)
        return
    from layout_tuner.cli.predictions.estimate_report import WIDTH, text
    from layout_tuner.predictions import plan_and_estimate

    with refusals():
        predicted = plan_and_estimate.estimate(
            str(model),
            knobs,
            seq_length=seq_length,
            cluster=written_out(cluster, data_dir),
            software=software or "",
            calibrate_from=calibrate_from,
            data_dir=data_dir,
            job=job,
        )
    report = predicted.to_mapping()
    click.echo(json.dumps(report) if as_json else text(report, all_terms=all_terms))
    if as_json:
        return
    if job is not None and predicted.job_estimate is not None:
        from layout_tuner.predictions.belief.plan_text import job_lines

        click.echo(
            "\n".join(("", *job_lines(job, [("this layout", predicted.job_estimate)], WIDTH)))
        )
    if lacks := report["model"].get("lacks"):
        click.echo(f"note: the model lacks {lacks}", err=True)
    for warning in predicted.warnings:
        click.echo(f"warning: {warning}", err=True)


def _predict_table(
    path: Path, software: str | None, calibrate_from: tuple[str, ...], out: Path | None
) -> None:
    from layout_tuner.predictions.estimator import Calibration, with_predictions
    from layout_tuner.predictions.plan_and_estimate import read_knowledge
    from layout_tuner.search_spaces.tables import read_table, write_table

    with refusals(), work_line(sys.stderr, ticks=True) as line:
        if calibrate_from:
            line.say("reading the measurements that calibrate")
        calibration = Calibration(read_knowledge(calibrate_from))
        line.say(f"reading {path.name}")
        read = read_table(path)
        ran_by = None if software is None else software_named(software)
        predicted, warnings = with_predictions(read, calibration, software=ran_by, say=line.say)
        line.say("writing the table")
        text = write_table(predicted)
    notes = [f"note: {note}" for note in read.notes]
    for remark in (*notes, *(f"warning: {warning}" for warning in warnings)):
        click.echo(remark, err=True)
    if out is None:
        click.echo(text, nl=False)
        return
    with writing(out):
        out.write_text(text)
    click.echo(f"wrote {counted(len(read.rows), 'row')} to {out}", err=True)

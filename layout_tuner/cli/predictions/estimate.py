"""The command `layout-tuner estimate`."""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from layout_tuner.cli.live_output import work_line
from layout_tuner.cli.options.command_input import described, fail, refuse
from layout_tuner.cli.options.prediction_options import (
    calibrate_from_option,
    data_dir_option,
    measured_cluster,
    software_option,
)
from layout_tuner.cli.options.shared_options import job_options, layout_of, layout_options
from layout_tuner.errors import SearchSpaceError
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.terminal.plurals import counted

if TYPE_CHECKING:
    from layout_tuner.predictions.estimator import Calibration, Estimator
    from layout_tuner.search_spaces.clusters.cluster import Cluster
    from layout_tuner.search_spaces.layouts.layout import Layout


@click.command()
@click.option("--model", help="Name of a model preset, or a JSON or YAML file.")
@click.option("--cluster", default="local-cpu", show_default=True, help="What it would run on.")
@layout_options
@software_option
@click.option(
    "--table",
    type=click.Path(path_type=Path),
    help="Instead of one layout: a measurement table, whose every row gets predicted columns.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Where that goes; by default stdout.")
@calibrate_from_option
@data_dir_option
@click.option(
    "--all-terms",
    is_flag=True,
    help="Print every part of the step time; by default those below 1 % are added up.",
)
@job_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, all parts in it.")
def estimate(
    model: str | None,
    cluster: str,
    software: str,
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

    With --table: of every row of a measurement table, whose own measurements are not looked at.
    With --tokens: also the days of the training job.
    """
    if (model is None) == (table is None):
        refuse("say either --model, for one layout, or --table, for a table of them")
    if out is not None and table is None:
        refuse(f"--out {out} goes with --table; for one layout redirect the output")
    if table is not None and job is not None:
        refuse("--tokens goes with --model; a job has one layout")
    if table is not None:
        _predict_table(table, calibrate_from, out)
        return
    calibration = _calibration(calibrate_from)
    from layout_tuner.cli.predictions.estimate_report import WIDTH, document, text

    machine = _machine(cluster, data_dir)
    estimator, layout = _asked(str(model), machine, software, knobs, calibration)
    report = document(estimator, layout, job)
    click.echo(json.dumps(report) if as_json else text(report, all_terms=all_terms))
    if not as_json:
        if job is not None:
            from layout_tuner.predictions.belief.plan_text import job_lines

            lines = job_lines(job, [("this layout", estimator.job(job, layout))], WIDTH)
            click.echo("\n".join(("", *lines)))
        for warning in report["warnings"]:
            click.echo(f"warning: {warning}", err=True)


def _asked(
    model: str, machine: Cluster, software: str, knobs: dict[str, Any], calibration: Calibration
) -> tuple[Estimator, Layout]:
    """The estimator and the layout; refuses what cannot be."""
    from layout_tuner.predictions.estimator import Estimator
    from layout_tuner.search_spaces.layouts.layout import DEGREES
    from layout_tuner.search_spaces.legality_rules import PROBE_SCOPES, violations
    from layout_tuner.search_spaces.models.model_presets import resolve_model

    try:
        shape = resolve_model(described(model))
        devices = prod(knobs[name] for name in DEGREES)
        nodes = max(-(-devices // machine.devices_per_node), 1)
        layout = layout_of(knobs, machine, num_nodes=nodes)
    except SearchSpaceError as error:
        refuse(str(error))
    # Other trainers have other rules.
    scopes = PROBE_SCOPES if not software else PROBE_SCOPES - {"trainer", "model"}
    if broken := violations(layout, shape, machine, scopes=scopes):
        refuse(*broken)
    return Estimator(
        model=shape, cluster=machine, software=software, calibration=calibration
    ), layout


def _predict_table(path: Path, calibrate_from: tuple[str, ...], out: Path | None) -> None:
    from layout_tuner.predictions.estimator import with_predictions
    from layout_tuner.search_spaces.tables import read_table, write_table

    with work_line(sys.stderr, ticks=True) as line:
        if calibrate_from:
            line.say("reading the measurements that calibrate")
        calibration = _calibration(calibrate_from)
        line.say(f"reading {path.name}")
        try:
            read = read_table(path)
        except SearchSpaceError as error:
            refuse(str(error))
        predicted, warnings = with_predictions(read, calibration, say=line.say)
        line.say("writing the table")
        text = write_table(predicted)
    notes = [f"note: {note}" for note in read.notes]
    for remark in (*notes, *(f"warning: {warning}" for warning in warnings)):
        click.echo(remark, err=True)
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        out.write_text(text)
    except OSError as error:
        fail(f"{out} cannot be written: {error.strerror}")
    click.echo(f"wrote {counted(len(read.rows), 'row')} to {out}", err=True)


def _calibration(calibrate_from: tuple[str, ...]) -> Calibration:
    from layout_tuner.predictions.belief.known_measurements import (
        knowledge_of,
        read_calibrating_cells,
    )
    from layout_tuner.predictions.estimator import Calibration

    try:
        cells = [cell for text in calibrate_from for cell in read_calibrating_cells(text)]
        return Calibration(knowledge_of(cells))
    except SearchSpaceError as error:
        refuse(str(error))


def _machine(cluster: str, data_dir: Path | None) -> Cluster:
    """The described cluster, with the constants that were measured on it, where any were."""
    from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster

    try:
        machine, warning = resolve_cluster(measured_cluster(cluster, data_dir))
    except SearchSpaceError as error:
        refuse(str(error))
    if warning is not None:
        click.echo(f"warning: {warning}", err=True)
    return machine

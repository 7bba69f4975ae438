"""The command `layout-tuner plan`."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from layout_tuner.cli.options.job_options import job_options
from layout_tuner.cli.options.prediction_options import (
    FILE,
    calibrate_from_option,
    campaign_cluster_option,
    campaign_document,
    constants_dir_option,
)
from layout_tuner.cli.options.refusals import refusals, refuse
from layout_tuner.cli.options.software_option import software_option
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.terminal.console import terminal_width

if TYPE_CHECKING:
    from layout_tuner.predictions.belief.plan import Plan, PlannedLayout

_TEXT: Final = "text"


@click.command()
@click.argument("campaign", type=FILE)
@campaign_cluster_option
@software_option("the trainer of the campaign's probes")
@calibrate_from_option
@constants_dir_option
@click.option(
    "--top", type=click.IntRange(1, 1000), default=10, show_default=True, help="Layouts to list."
)
@click.option(
    "--probe-start-s",
    type=click.FloatRange(min=0, max=1e6),
    help="Seconds that a probe is taken to last besides its steps.  [default: 60]",
)
@click.option(
    "--compare",
    nargs=2,
    metavar="KEY KEY",
    help="Two layouts, by rank or key: also print why one is before the other.",
)
@job_options
@click.option(
    "--format",
    "form",
    type=click.Choice([_TEXT, "json", "csv"]),
    default=_TEXT,
    show_default=True,
    help="How it is printed.",
)
@click.option("--json", "as_json", is_flag=True, help="The same as --format json.")
def plan(
    campaign: Path,
    cluster: str | None,
    software: str | None,
    calibrate_from: tuple[str, ...],
    data_dir: Path | None,
    top: int,
    probe_start_s: float | None,
    compare: tuple[str, str] | None,
    job: TrainingJob | None,
    form: str,
    as_json: bool,
) -> None:
    """Rank the legal layouts of the campaign in a file by predictions, without running any.

    It needs no service. Beside the layouts it prints what is illegal and why, how good the
    campaign's baseline is, what the budget buys, and on what the predictions rest; with --tokens,
    the days of the training job; with --compare, the difference of two layouts by part of the step
    and of the memory.
    """
    from layout_tuner.predictions import plan_and_estimate

    if as_json and form == "csv":
        refuse("--json and --format csv exclude each other")
    with refusals():
        planned = plan_and_estimate.plan(
            campaign_document(campaign, cluster, data_dir),
            software=software or "",
            calibrate_from=calibrate_from,
            data_dir=data_dir,
            top=top,
            probe_start_s=probe_start_s,
            job=job,
            compare=compare,
        )
    if as_json or form == "json":
        click.echo(json.dumps(asdict(planned), indent=2))
    elif form == "csv":
        click.echo(_csv(planned), nl=False)
    else:
        from layout_tuner.predictions.belief.plan_text import plan_lines

        click.echo("\n".join(plan_lines(planned, terminal_width(sys.stdout))))


def _csv(planned: Plan) -> str:
    """The ranked layouts as CSV; the headings of predicted figures begin with `predicted_`."""
    rows = [dict(_cells(each)) for each in planned.rows]
    text = io.StringIO()
    # A layout that cannot be used on the job's nodes has fewer cells.
    names = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _cells(each: PlannedLayout) -> Iterator[tuple[str, Any]]:
    yield "rank", each.rank
    yield "layout_key", each.layout_key
    yield from each.layout.to_mapping(every_knob=True).items()
    yield from _prefixed("predicted", asdict(each.predicted))
    yield "predicted_best_chance", each.best_chance
    yield "predicted_limited_by", each.limited_by
    yield "is_baseline", each.is_baseline
    yield "refused", "; ".join(each.refused)
    if each.job is not None:
        yield "job_layout_key", each.job.layout_key
        duration = {} if each.job.duration is None else asdict(each.job.duration)
        yield from _prefixed("predicted_job", duration)
        yield "job_problem", each.job.problem


def _prefixed(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        yield f"{prefix}_{name}", value

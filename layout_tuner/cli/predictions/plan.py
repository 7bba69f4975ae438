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

from layout_tuner.cli.options.command_options import stated
from layout_tuner.cli.options.found_job_options import found_job_options, log_option, on_cluster
from layout_tuner.cli.options.job_options import FROM, job_options_beside_from
from layout_tuner.cli.options.prediction_options import (
    FILE,
    calibrate_from_option,
    campaign_cluster_option,
    campaign_document,
    constants_dir_option,
)
from layout_tuner.cli.options.refusals import refusals, refuse
from layout_tuner.cli.options.software_option import software_option
from layout_tuner.errors import CampaignInvalidError, DocumentMalformedError
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.terminal.console import terminal_width

if TYPE_CHECKING:
    from layout_tuner.predictions.belief.plan import Plan, PlannedLayout
    from layout_tuner.predictions.job_plan import JobAsked, JobPlan

_TEXT: Final = "text"
_OF_A_JOB: Final = ("model", "seq_length", "stated", "job_name", "log")
"""Parameters that describe a job's file."""


@click.command()
@click.argument("campaign", type=FILE, required=False)
@click.option(
    "--from",
    FROM,
    type=FILE,
    metavar="FILE",
    help="A job that runs today, in place of a campaign: a launch script or a trainer's configuration.",
)
@found_job_options
@log_option
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
@job_options_beside_from
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
    campaign: Path | None,
    job_file: Path | None,
    asked: JobAsked,
    log: Path | None,
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
    """Rank the legal layouts of the campaign in a file, or of a job, by predictions alone.

    It needs no service. Beside the layouts it prints what is illegal and why, how good the
    campaign's baseline is, what the budget buys, and on what the predictions rest; with --tokens,
    the days of the training job; with --compare, the difference of two layouts by part of the step
    and of the memory.

    With --from, the campaign is that of a job that runs today: its layout is the baseline among all
    sensible layouts on its nodes. Nothing in the file is executed. The answer begins with what was
    read of it, assumed, and not understood; with --log, it says what the measured step changes.
    """
    from layout_tuner.predictions import plan_and_estimate
    from layout_tuner.predictions.job_plan import plan_job

    if as_json and form == "csv":
        refuse("--json and --format csv exclude each other")
    _refuse_options(campaign, job_file)
    options: dict[str, Any] = {
        "software": software or "",
        "calibrate_from": calibrate_from,
        "data_dir": data_dir,
        "top": top,
        "probe_start_s": probe_start_s,
        "job": job,
        "compare": compare,
    }
    of_job = None
    with refusals():
        if job_file is not None:
            of_job = plan_job(job_file, on_cluster(asked, cluster, data_dir), log=log, **options)
            planned = of_job.plan
        else:
            assert campaign is not None
            document = _document(campaign, cluster, data_dir)
            planned = plan_and_estimate.plan(document, **options)
    if as_json or form == "json":
        click.echo(json.dumps(asdict(planned) | _found_document(of_job), indent=2))
    elif form == "csv":
        click.echo(_csv(planned), nl=False)
    else:
        from layout_tuner.predictions.belief.plan_text import plan_lines

        width = terminal_width(sys.stdout)
        lines = [*_found_lines(of_job, width), *plan_lines(planned, width)]
        click.echo("\n".join(lines))


def _document(campaign: Path, cluster: str | None, data_dir: Path | None) -> dict[str, Any]:
    """The campaign of a file; an error of one that is a script names --from."""
    try:
        return campaign_document(campaign, cluster, data_dir)
    except (DocumentMalformedError, CampaignInvalidError) as error:
        if campaign.suffix in (".yaml", ".yml", ".json"):
            raise
        raise DocumentMalformedError(f"{error}; is it a job's file? Give it with --from") from error


def _refuse_options(campaign: Path | None, job_file: Path | None) -> None:
    """Refuses a campaign and a job together, neither, and options of a job without one."""
    if (campaign is None) == (job_file is None):
        refuse("give the file of a campaign, or a job's with --from: one of the two")
    if job_file is None and (of_job := stated(*_OF_A_JOB)):
        refuse(f"{', '.join(of_job)}: only with --from, for a job's file")


def _found_document(of_job: JobPlan | None) -> dict[str, Any]:
    if of_job is None:
        return {}
    from layout_tuner.cli.predictions.job_report import job_document, log_document

    log = None if of_job.log is None else log_document(of_job.log)
    return {"found_job": job_document(of_job.campaign.job.found), "log": log}


def _found_lines(of_job: JobPlan | None, width: int | None) -> Iterator[str]:
    if of_job is None:
        return
    from layout_tuner.cli.predictions.job_report import found_lines, log_lines

    yield from found_lines(of_job.campaign, width)
    yield ""
    if of_job.log is not None:
        yield from log_lines(of_job.log, of_job, width)
        yield ""


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

"""`layout-tuner leaderboard`: a campaign's completed trials, ranked."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from layout_tuner.api.formatting import baseline_words, cheap_count_words, gain_sentence, made_by
from layout_tuner.api.ranked_columns import LAYOUT, cells, device_peak_words, headings
from layout_tuner.cli.options.command_options import json_option
from layout_tuner.cli.options.job_options import job_options
from layout_tuner.cli.options.refusals import writing
from layout_tuner.cli.service.service_connection import print_jobs, print_json, service_options
from layout_tuner.cli.service.trial import read_conditions, where_option
from layout_tuner.predictions.statistics.disturbance import MEANING
from layout_tuner.search_spaces.objectives import OBJECTIVES
from layout_tuner.terminal.console import write_bytes
from layout_tuner.terminal.plurals import counted
from layout_tuner.terminal.text_table import print_table

if TYPE_CHECKING:
    from layout_tuner.api.schemas.campaigns_and_trials import CampaignDetail, LeaderboardPage
    from layout_tuner.client.clients import Client
    from layout_tuner.predictions.belief.job import JobEstimate
    from layout_tuner.predictions.statistics.job_duration import TrainingJob

_OUTPUT: Final = Path("-")


@click.command()
@click.argument("campaign")
@click.option("--objective", type=click.Choice(OBJECTIVES), help="What to rank by.")
@click.option("--front", is_flag=True, help="Only the Pareto front over the campaign's objectives.")
@click.option(
    "--within",
    type=click.FloatRange(0, 100),
    metavar="PERCENT",
    help="Only layouts so close to the best, the cheapest first: by node-hours a token.",
)
@where_option
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=10, show_default=True, help="Rows to show."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print a measurement table.")
@click.option(
    "--parquet",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
    help="Write the measurement table to this file, as Parquet; - is the output, unless a terminal.",
)
@click.option(
    "--intervals", is_flag=True, help="With --csv or --parquet: also runs, intervals and ties."
)
@job_options
@json_option
@service_options
def leaderboard(
    campaign: str,
    objective: str | None,
    front: bool,
    within: float | None,
    conditions: Sequence[str],
    limit: int,
    as_csv: bool,
    parquet: Path | None,
    intervals: bool,
    job: TrainingJob | None,
    as_json: bool,
    client: Client,
) -> None:
    """Rank the layouts that a campaign measured, the best first.

    Repeats of a layout count together; half of the 95 % interval follows the figure.

    With --where only layouts that meet the conditions are listed, by the measurement of their first
    trial. Each keeps its rank on the whole leaderboard, and is compared with the first of all, also
    with --front and --within.

    A campaign of several objectives is ranked by its first; a star marks its Pareto front. Trials
    that break its constraints are counted, and not ranked. A star marks the campaign's baseline,
    too, and a line says what the winner gains over it.

    With --tokens the days of the training job follow, from the measured step times; on more nodes
    than the measured ones these are multiplied by the ratio of the predicted step times.
    """
    if job is not None and (as_csv or parquet is not None):
        raise click.UsageError("--tokens does not go with --csv or --parquet")
    if as_csv + as_json + (parquet is not None) > 1:
        raise click.UsageError("--csv, --json and --parquet exclude each other")
    asked: dict[str, Any] = {
        "objective": objective,
        "front": front,
        "within": within,
        "limit": limit,
        "wanted": read_conditions(conditions),
    }
    if as_csv:
        click.echo(client.leaderboard_csv(campaign, intervals=intervals, **asked), nl=False)
        return
    if parquet is not None:
        _refuse_terminal(parquet)
        content = client.leaderboard_parquet(campaign, intervals=intervals, **asked)
        _write(parquet, content, limit)
        return
    page = client.leaderboard(campaign, **asked)
    if as_json and job is None:
        print_json(page)
        return
    campaign_read = client.campaign(campaign)
    jobs = [] if job is None else _jobs(job, campaign_read, page)
    if as_json:
        document = page.model_dump(mode="json")
        document["job"] = asdict(job) if job else None
        document["jobs"] = [asdict(estimate) for _, estimate in jobs]
        click.echo(json.dumps(document, indent=2))
        return
    if page.trials:
        _print_ranking(campaign, page, conditions, front=front, within=within)
    else:
        met = " that meets every --where" if conditions else ""
        click.echo(f"campaign {campaign} has no ranked trial{met} yet")
    _print_remarks(page)
    if campaign_read.cheap_probes:
        took = campaign_read.cheap_probe_node_seconds
        click.echo(f"beside them: {cheap_count_words(campaign_read.cheap_probes, took)}")
    if (baseline := campaign_read.baseline) is not None:
        objective = campaign_read.objective
        words = f"baseline: {baseline_words(baseline, objective)}"
        gain = baseline.gain
        click.echo(words if gain is None else gain_sentence(gain, baseline, objective))
    if job is not None:
        print_jobs(job, jobs)


def _jobs(
    job: TrainingJob, campaign: CampaignDetail, page: LeaderboardPage
) -> list[tuple[str, JobEstimate]]:
    """The training job with each listed layout."""
    from layout_tuner.api.campaigns.measured_jobs import measured_jobs  # it imports numpy

    return measured_jobs(job, campaign.stored.spec, page.trials)


def _print_remarks(page: LeaderboardPage) -> None:
    """Prints where the measurements come from, ties with the first, and what is not ranked."""
    if page.source is not None:
        click.echo(f"imported, not measured here: {page.source or 'of unknown origin'}")
    measured = page.trials[0].measurement if page.trials else None
    if measured is not None and (words := made_by(measured)):
        click.echo(f"MFU is by the peak of a device, {words}.")
    best = min((trial.rank for trial in page.trials), default=1)
    if best > 1:
        click.echo(
            f"ranks are those of the whole leaderboard: the best that is listed is rank {best}"
        )
    tied = [str(trial.number) for trial in page.trials if trial.tied_with_first and trial.rank > 1]
    if tied:
        first = "the first" if best == 1 else "rank 1, which is not listed"
        click.echo(f"cannot be told apart from {first} (95 %): trial {', '.join(tied)}")
    if short := [str(trial.number) for trial in page.trials if trial.shortened]:
        listed = ", ".join(short)
        click.echo(f"stopped early, slower than the best of their time: trial {listed}")
    if any(trial.disturbed for trial in page.trials):
        click.echo(MEANING)
    if page.constrained:
        click.echo(
            f"not ranked, for they break the campaign's constraints: "
            f"{counted(page.constrained, 'completed trial')}"
        )


def _refuse_terminal(path: Path) -> None:
    try:
        is_terminal = sys.stdout.isatty() if path == _OUTPUT else _is_terminal(path)
    except OSError:
        return  # writing the file reports the problem
    if is_terminal:
        raise click.UsageError(
            "--parquet: the table is binary, and that is a terminal: name a file, or send the output "
            "into one"
        )


def _is_terminal(path: Path) -> bool:
    if not path.is_char_device():
        return False
    with path.open("rb") as opened:
        return opened.isatty()


def _write(path: Path, content: bytes, limit: int) -> None:
    with writing(path, "written to"):
        if path == _OUTPUT:
            write_bytes(content)
        else:
            path.write_bytes(content)
    where = "the table" if path == _OUTPUT else path
    # The rows are not counted: reading Parquet takes a package that the base install lacks.
    click.echo(f"wrote {where}: at most {limit} rows, see --limit", err=path == _OUTPUT)


def _print_ranking(
    campaign: str,
    page: LeaderboardPage,
    conditions: Sequence[str],
    *,
    front: bool,
    within: float | None,
) -> None:
    others = [name for name in page.objectives if name != page.objective]
    names = (
        *("rank", "number", *LAYOUT, page.objective, *others),
        *(("on_front",) if others else ()),
        *(("is_baseline",) if any(trial.is_baseline for trial in page.trials) else ()),
        *("step_time_s", "half_interval", "runs", "mfu", "peak_memory_bytes"),
    )
    what = "of the front, " if front else ""
    which = "best" if within is None else "cheapest"
    close = "" if within is None else f", at most {within:g} % under the best"
    met = f", where {' and '.join(conditions)}" if conditions else ""
    title = (
        f"{campaign}: {what}the {which} {len(page.trials)} of {page.total} by {page.objective}"
        f"{close}{met}"
    )
    rows = [cells(names, trial) for trial in page.trials]
    print_table(headings(names), rows, title, keys=2)
    if words := device_peak_words(page.trials):
        click.echo(f"MFU is by the peak of a device, {words}.")

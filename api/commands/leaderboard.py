"""`layout-tuner leaderboard`: a campaign's completed trials, ranked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from api.client import Client
from api.commands.connection import json_option, print_json, service_options
from api.commands.display import layout_extras, memory, objective_figure, print_table, unit, zero
from api.commands.trial_conditions import read_conditions, where_option
from api.schemas import LeaderboardPage, RankedTrial
from search_spaces.counting import counted
from search_spaces.objectives import OBJECTIVES


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
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write the measurement table to this file, as Parquet.",
)
@click.option(
    "--intervals", is_flag=True, help="With --csv or --parquet: also runs, intervals and ties."
)
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
    as_json: bool,
    client: Client,
) -> None:
    """Rank the layouts that a campaign measured, the best first.

    Repeats of a layout count together; what follows the figure is half of its 95 % interval.

    With --where only layouts that meet the conditions are listed, by the measurement of their first trial;
    what they are compared with stays the first of all.

    A campaign of several objectives is ranked by its first; a star marks its Pareto front. Trials that
    break its constraints are counted, and not ranked.
    """
    if as_csv + as_json + (parquet is not None) > 1:
        raise click.UsageError("--csv, --json and --parquet exclude each other")
    asked: dict[str, Any] = {
        "objective": objective,
        "front": front,
        "within": within,
        "wanted": read_conditions(conditions),
        "limit": limit,
    }
    if as_csv:
        click.echo(client.leaderboard_csv(campaign, intervals=intervals, **asked), nl=False)
        return
    if parquet is not None:
        _write(parquet, client.leaderboard_parquet(campaign, intervals=intervals, **asked))
        return
    page = client.leaderboard(campaign, **asked)
    if as_json:
        print_json(page)
        return
    if page.trials:
        _print_ranking(campaign, page, front=front, within=within)
    else:
        met = " that meets every --where" if conditions else ""
        click.echo(f"campaign {campaign} has no ranked trial{met} yet")
    _print_remarks(page)


def _print_remarks(page: LeaderboardPage) -> None:
    if page.source is not None:
        click.echo(f"imported, not measured here: {page.source or 'of unknown origin'}")
    for line in _notes(page):
        click.echo(line)
    if page.constrained:
        click.echo(
            f"not ranked, for they break the campaign's constraints: "
            f"{counted(page.constrained, 'completed trial')}"
        )


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written to: {error.strerror}") from error


def _print_ranking(
    campaign: str, page: LeaderboardPage, *, front: bool, within: float | None
) -> None:
    others = [name for name in page.objectives if name != page.objective]
    columns = (
        ">rank",
        ">trial",
        ">nodes",
        ">tp",
        ">pp",
        ">dp",
        ">mbs",
        ">acc",
        ">batch",
        ">zero",
        "also",
        f">{unit(page.objective)}",
        *(f">{unit(name)}" for name in others),
        *(("front",) if others else ()),
        ">step",
        ">95 %",
        ">runs",
        ">MFU",
        ">memory",
    )
    what = "of the front, " if front else ""
    which = "best" if within is None else "cheapest"
    close = "" if within is None else f", at most {within:g} % under the best"
    title = f"{campaign}: {what}the {which} {len(page.trials)} of {page.total} by {page.objective}{close}"
    rows = [_row(trial, (page.objective, *others)) for trial in page.trials]
    print_table(columns, rows, title)


def _half_interval(trial: RankedTrial) -> str:
    if trial.value_high is None:
        return "-"
    return f"±{trial.value_high / trial.value - 1:.1%}"


def _notes(page: LeaderboardPage) -> list[str]:
    """What the order alone does not say: who is as good as the first, and who was stopped early."""
    tied = [str(trial.number) for trial in page.trials[1:] if trial.tied_with_first]
    short = [str(trial.number) for trial in page.trials if trial.shortened]
    notes = []
    if tied:
        notes.append(f"cannot be told apart from the first (95 %): trial {', '.join(tied)}")
    if short:
        notes.append(f"stopped early, slower than the best of their time: trial {', '.join(short)}")
    return notes


def _row(trial: RankedTrial, objectives: tuple[str, ...]) -> tuple[str, ...]:
    layout, measured = trial.layout, trial.measurement
    assert measured is not None  # it is ranked
    speedup = measured.step_time_s / trial.step_time_s
    return (
        str(trial.rank),
        str(trial.number),
        str(layout.num_nodes),
        str(layout.tp),
        str(layout.pp),
        str(layout.dp),
        str(layout.micro_batch_size),
        str(layout.num_microbatches),
        str(trial.global_batch_size),
        zero(layout),
        layout_extras(layout),
        objective_figure(objectives[0], trial.value),
        *(objective_figure(name, trial.objectives[name]) for name in objectives[1:]),
        *(("*" if trial.on_front else "",) if len(objectives) > 1 else ()),
        f"{trial.step_time_s:.4g} s",
        _half_interval(trial),
        str(trial.num_runs),
        "-" if measured.mfu is None else f"{measured.mfu * speedup:.1%}",
        memory(measured.peak_memory_bytes),
    )

"""`layout-tuner leaderboard`: a campaign's completed trials, ranked."""

from __future__ import annotations

import click

from api.client import Client
from api.commands.connection import json_option, print_json, service_options
from api.commands.display import figure, layout_extras, memory, print_table, unit, zero
from api.schemas import LeaderboardPage, RankedTrial
from search_spaces.objectives import OBJECTIVES, measured_objective


@click.command()
@click.argument("campaign")
@click.option("--objective", type=click.Choice(OBJECTIVES), help="What to rank by.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=10, show_default=True, help="Rows to show."
)
@click.option("--csv", "as_csv", is_flag=True, help="Print a measurement table.")
@json_option
@service_options
def leaderboard(
    campaign: str,
    objective: str | None,
    limit: int,
    as_csv: bool,
    as_json: bool,
    client: Client,
) -> None:
    """Rank a campaign's completed trials, the best first."""
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other")
    if as_csv:
        table = client.leaderboard_csv(campaign, objective=objective, limit=limit)
        click.echo(table, nl=False)
        return
    page = client.leaderboard(campaign, objective=objective, limit=limit)
    if as_json:
        print_json(page)
    elif not page.trials:
        click.echo(f"campaign {campaign} has no ranked trial yet")
    else:
        _print_ranking(campaign, page)


def _print_ranking(campaign: str, page: LeaderboardPage) -> None:
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
        ">step",
        ">MFU",
        ">memory",
    )
    title = f"{campaign}: the best {len(page.trials)} of {page.total} by {page.objective}"
    print_table(columns, [_row(trial, page.objective) for trial in page.trials], title)


def _row(trial: RankedTrial, objective: str) -> tuple[str, ...]:
    layout, measured = trial.layout, trial.measurement
    assert measured is not None  # it is ranked
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
        figure(measured_objective(objective, measured, num_nodes=layout.num_nodes)),
        f"{measured.step_time_s:.4g} s",
        f"{measured.mfu:.1%}",
        memory(measured.peak_memory_bytes),
    )

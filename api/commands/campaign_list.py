"""`layout-tuner campaign list`: campaigns by what they are about, who submitted them, and when."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from typing import Any, cast

import click

from api.client import Client
from api.commands.connection import json_option, print_json, service_options
from api.commands.display import print_table
from api.figures import duration, figure, unit
from api.schemas import CampaignPage, CampaignRead
from results_db.campaign_filter import CampaignFilter
from results_db.records import CAMPAIGN_STATES
from search_spaces.campaign import STRATEGIES
from search_spaces.objectives import ALL_OBJECTIVES


def _moment(
    _context: click.Context, _parameter: click.Parameter, written: str | None
) -> datetime | None:
    if written is None:
        return None
    try:
        moment = datetime.fromisoformat(written)
    except ValueError as error:
        raise click.BadParameter(
            f"{written!r} is no time; write 2026-08-01 or 2026-08-01T12:00+02:00"
        ) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


@click.command("list")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(CAMPAIGN_STATES, case_sensitive=False),
    help="Only these states; may be repeated.",
)
@click.option("--model", help="Name of the model.")
@click.option("--cluster", help="Name of the cluster.")
@click.option("--strategy", type=click.Choice((*STRATEGIES, "imported")))
@click.option("--objective", type=click.Choice(ALL_OBJECTIVES), help="Any of the objectives.")
@click.option("--created-by", help="Name of the token that submitted it.")
@click.option("--name-contains", help="A part of the name, in upper or lower case.")
@click.option(
    "--created-after",
    callback=_moment,
    metavar="TIME",
    help="This moment or later, as 2026-08-01; UTC without a zone.",
)
@click.option("--created-before", callback=_moment, metavar="TIME", help="Earlier than it.")
@click.option("--limit", type=click.IntRange(min=1), help="The youngest so many.")
@json_option
@service_options
def list_campaigns(
    as_json: bool, client: Client, limit: int | None, states: tuple[str, ...], **asked: Any
) -> None:
    """List campaigns, the youngest first: all, or those that meet all that is asked."""
    chosen = CampaignFilter(states=cast("Any", states), **asked)
    found = list(islice(client.campaigns(chosen), limit))
    if as_json:
        print_json(CampaignPage(campaigns=found, next_cursor=None))
        return
    columns = ("name", "state", "model", "cluster", "by", ">trials", ">best", "unit", ">time left")
    print_table(columns, [_row(campaign) for campaign in found])


def _row(campaign: CampaignRead) -> tuple[str, ...]:
    progress = campaign.progress
    planned = "" if progress.trials_planned is None else f"/{progress.trials_planned}"
    return (
        campaign.name,
        campaign.state if campaign.reason is None else f"{campaign.state} ({campaign.reason})",
        campaign.model,
        campaign.cluster,
        campaign.created_by,
        f"{progress.trials_ended}{planned}",
        figure(progress.best),
        unit(campaign.objective),
        "-" if campaign.ended_at else duration(progress.seconds_left),
    )

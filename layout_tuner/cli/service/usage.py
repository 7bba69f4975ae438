"""`layout-tuner usage`: node-hours by owner, group, campaign or cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from layout_tuner.api.formatting import usage_cells
from layout_tuner.cli.options.command_options import json_option
from layout_tuner.cli.service.service_connection import print_json, service_options
from layout_tuner.results_db.service_records import USAGE_BY
from layout_tuner.terminal.text_table import print_table

if TYPE_CHECKING:
    from layout_tuner.client.clients import Client


@click.command()
@click.option("--by", type=click.Choice(USAGE_BY), default="owner", show_default=True)
@click.option("--since", default="30d", show_default=True, help="First day: 2026-11-01, or 7d ago.")
@click.option("--until", help="Last day, in the same forms.  [default: today]")
@click.option("--simulated", is_flag=True, help="Simulated campaigns, not measured ones.")
@click.option("--tokens", default="1T", show_default=True, help="Of each tuned job, for savings.")
@click.option("--csv", "as_csv", is_flag=True, help="Print a table for spreadsheets.")
@json_option
@service_options
def usage(client: Client, as_csv: bool, as_json: bool, **asked: Any) -> None:
    """Print the node-hours that campaigns used in a period of whole days, in UTC."""
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other")
    if as_csv:
        return click.echo(client.usage_csv(**asked), nl=False)
    found = client.usage(**asked)
    if as_json:
        return print_json(found)
    cells = [usage_cells(row) for row in (*found.rows, replace(found.total, name="all"))]
    title = f"node-hours by {found.by} from {found.since} to {found.until}"
    return print_table(list(cells[0]), [list(each.values()) for each in cells], title)

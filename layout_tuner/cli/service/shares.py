"""`layout-tuner shares`, and `layout-tuner quota`: list, set, remove."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from layout_tuner.api.schemas.access import QuotaPage, QuotaPut, SharePage
from layout_tuner.cli.options.command_options import together
from layout_tuner.cli.service.service_connection import answers, service_options
from layout_tuner.results_db.actor import QUOTA_ACTIONS, QUOTA_KINDS, QUOTA_PERIODS
from layout_tuner.results_db.service_records import QuotaRead
from layout_tuner.terminal.text_table import print_table

if TYPE_CHECKING:
    from layout_tuner.client.clients import Client

_SHARE: Final = {"cluster": "", "owner": "", "weight": "g", "entitled": ".1%", "had": ".1%"}
_USE: Final = {"node_hours": ".4g", "running": "d", "waiting": "d"}
_QUOTA: Final = {"kind": "", "name": "", "period": "", "node_hours": "g", "used_node_hours": ".4g"}
_RULE: Final = {"beyond": "", "until": "%Y-%m-%d %H:%M"}
"""Columns and their formats."""

_which = together(
    click.argument("kind", type=click.Choice(QUOTA_KINDS)),
    click.argument("name"),
    click.option("--per", "period", type=click.Choice(QUOTA_PERIODS), required=True, help="UTC."),
    service_options,
)


def _print(columns: dict[str, str], *rows: Any) -> None:
    heads = [">" * (f[-1:] in ("g", "d", "%")) + n.replace("_", " ") for n, f in columns.items()]
    cells = [[(getattr(row, name), kind) for name, kind in columns.items()] for row in rows]
    print_table(heads, [["" if x is None else format(x, f) for x, f in row] for row in cells])


@click.command()
@answers(lambda page: _print(_SHARE | _USE, *page.shares))
@service_options
def shares(client: Client) -> SharePage:
    """List what owners have had of clusters lately, and what they are entitled to."""
    return client.shares()


@click.command("list")
@answers(lambda page: _print(_QUOTA | _RULE, *page.quotas))
@service_options
def list_quotas(client: Client) -> QuotaPage:
    """List quotas, and what is used of them."""
    return client.quotas()


@click.command("set")
@click.option("--node-hours", type=float, required=True, help="Most measured node-hours.")
@click.option(
    "--beyond",
    type=click.Choice(QUOTA_ACTIONS),
    default="refuse",
    show_default=True,
    help="What becomes of a campaign beyond it: refused at its submission, or its trials wait.",
)
@click.option("--until", type=click.DateTime(), help="When it ends for good, in UTC.")
@answers(partial(_print, _QUOTA | _RULE))
@_which
def set_quota(
    kind: Any, name: str, period: Any, until: datetime | None, client: Client, **given: Any
) -> QuotaRead:
    """Set the quota of an owner or a group; the owner * is everyone without one of their own."""
    end = None if until is None else until.replace(tzinfo=UTC)
    return client.put_quota(kind, name, period, QuotaPut.model_construct(until=end, **given))


@click.command("remove")
@_which
def remove_quota(kind: Any, name: str, period: Any, client: Client) -> None:
    """Take a quota away."""
    client.delete_quota(kind, name, period)
    click.echo(f"the {kind} {name} has no quota for a {period}")

"""`layout-tuner shares`, and `layout-tuner quota`: list, set, remove."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from layout_tuner.api.schemas.access import QuotaPage, QuotaPut, SharePage
from layout_tuner.cli.options.command_options import together
from layout_tuner.cli.service.service_connection import answers, service_options
from layout_tuner.results_db.actor import QUOTA_ACTIONS, QUOTA_KINDS, QUOTA_PERIODS
from layout_tuner.results_db.service_records import QuotaRead
from layout_tuner.terminal.text_table import print_table

if TYPE_CHECKING:
    from layout_tuner.client.clients import Client

_SHARE = {"cluster": "", "owner": "", "weight": "g", "entitled": ".1%", "had": ".1%"}
_SHARE |= {"node_hours": ".4g", "total_node_hours": ".4g", "running": "d", "waiting": "d"}
_QUOTA = {"kind": "", "name": "", "period": "", "node_hours": "g", "used_node_hours": ".4g"}
_QUOTA |= {"beyond": "", "until": "%Y-%m-%d %H:%M"}
"""Columns and their formats."""

_which = together(
    click.argument("kind", type=click.Choice(QUOTA_KINDS)),
    click.argument("name"),
    click.option("--per", "period", type=click.Choice(QUOTA_PERIODS), required=True, help="UTC."),
)


def _print(rows: Sequence[Any], columns: dict[str, str]) -> None:
    heads = [">" * (f[-1:] in ("g", "d", "%")) + n.replace("_", " ") for n, f in columns.items()]
    cells = [[getattr(row, name) for name in columns] for row in rows]
    shown = [
        ["" if c is None else format(c, f) for c, f in zip(row, columns.values(), strict=True)]
        for row in cells
    ]
    print_table(heads, shown)


@click.command()
@click.option("--cluster", help="Only this cluster.")
@answers(lambda page: _print(page.shares, _SHARE))
@service_options
def shares(cluster: str | None, client: Client) -> SharePage:
    """List what owners have had of clusters lately, and what they are entitled to."""
    return client.shares(cluster=cluster)


@click.command("list")
@answers(lambda page: _print(page.quotas, _QUOTA))
@service_options
def list_quotas(client: Client) -> QuotaPage:
    """List quotas, and what is used of them."""
    return client.quotas()


@click.command("set")
@_which
@click.option("--node-hours", type=float, required=True, help="Most measured node-hours.")
@click.option(
    "--beyond",
    type=click.Choice(QUOTA_ACTIONS),
    default="refuse",
    show_default=True,
    help="What becomes of a campaign beyond it: refused at its submission, or its trials wait.",
)
@click.option("--until", type=click.DateTime(), help="When it ends for good, in UTC.")
@answers(lambda quota: _print([quota], _QUOTA))
@service_options
def set_quota(
    kind: Any, name: str, period: Any, until: datetime | None, client: Client, **given: Any
) -> QuotaRead:
    """Set the quota of an owner or a group; the owner * is everyone without one of their own."""
    end = None if until is None else until.replace(tzinfo=UTC)
    return client.put_quota(kind, name, period, QuotaPut.model_construct(until=end, **given))


@click.command("remove")
@_which
@service_options
def remove_quota(kind: Any, name: str, period: Any, client: Client) -> None:
    """Take a quota away."""
    client.delete_quota(kind, name, period)
    click.echo(f"the {kind} {name} has no quota for a {period}")

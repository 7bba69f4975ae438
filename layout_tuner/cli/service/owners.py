"""`layout-tuner owner`: list, set, sign-out; `layout-tuner group`: list, set, delete."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

import click

from layout_tuner.api.schemas.access import GroupPage, OwnerPage, SignedOut
from layout_tuner.cli.service.service_connection import answers, service_options
from layout_tuner.results_db.service_records import GroupRead, OwnerRead
from layout_tuner.terminal.text_table import print_table

if TYPE_CHECKING:
    from layout_tuner.client.clients import Client

_WEIGHT: Final = "In fair shares, from 0.001 to 1000; it is 1 where nobody sets it."


def _print(*found: OwnerRead | GroupRead, others: str) -> None:
    print_table(
        ("name", ">weight", others),
        [(each.name, f"{each.weight:g}", ", ".join(getattr(each, others))) for each in found],
    )


@click.command("list")
@answers(lambda page: _print(*page.owners, others="groups"))
@service_options
def list_owners(client: Client) -> OwnerPage:
    """List owners, to whom campaigns belong, by name."""
    return client.owners()


@click.command("set")
@click.argument("name")
@click.option("--weight", type=float, help=_WEIGHT)
@click.option("--subject", help="Whom a provider signs in as the owner; empty: nobody.")
@answers(partial(_print, others="groups"))
@service_options
def set_owner(name: str, weight: float | None, subject: str | None, client: Client) -> OwnerRead:
    """Set the weight or the subject of an owner; one who is new is added."""
    return client.put_owner(name, weight, subject)


@click.command("sign-out")
@click.argument("name")
@answers(lambda ended: click.echo(f"{ended.sessions} sessions ended"))
@service_options
def sign_out(name: str, client: Client) -> SignedOut:
    """End all sessions of an owner in browsers; tokens stay."""
    return client.sign_out_owner(name)


@click.command("list")
@answers(lambda page: _print(*page.groups, others="members"))
@service_options
def list_groups(client: Client) -> GroupPage:
    """List all groups, with the token of an admin; with others, those of the token's owner."""
    return client.groups()


@click.command("set")
@click.argument("name")
@click.option("--weight", type=float, help=_WEIGHT)
@click.option("--member", "members", multiple=True, help="All of its owners; repeat it.")
@click.option("--add", "join", multiple=True, help="An owner who becomes a member; repeat it.")
@click.option("--remove", "leave", multiple=True, help="A member who leaves; repeat it.")
@answers(partial(_print, others="members"))
@service_options
def set_group(name: str, members: tuple[str, ...], client: Client, **changes: Any) -> GroupRead:
    """Set the weight of a group, all of its members or some; one that is new is added."""
    return client.put_group(name, members=members or None, **changes)


@click.command()
@click.argument("name")
@service_options
def delete(name: str, client: Client) -> None:
    """Delete a group; campaigns that were for it are then private."""
    client.delete_group(name)
    click.echo(f"the group {name} is deleted")

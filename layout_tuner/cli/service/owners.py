"""`layout-tuner owner`: list, set, sign-out; `group`: list, create, set, add, remove, delete."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

import click

from layout_tuner.api.schemas.access import GroupPage, OwnerPage, SignedOut
from layout_tuner.cli.options.command_options import together
from layout_tuner.cli.options.refusals import fail
from layout_tuner.cli.service.service_connection import answers, service_options
from layout_tuner.results_db.service_records import GroupRead, OwnerRead
from layout_tuner.terminal.text_table import print_table

if TYPE_CHECKING:
    from layout_tuner.client.clients import Client

Members = tuple[str, ...]

_WEIGHT: Final = "In fair shares, from 0.001 to 1000; it is 1 where nobody sets it."


def _print(*found: OwnerRead | GroupRead, others: str) -> None:
    print_table(
        ("name", ">weight", others),
        [(each.name, f"{each.weight:g}", ", ".join(getattr(each, others))) for each in found],
    )


_shown = answers(partial(_print, others="members"))
_group_options = together(
    click.argument("name"),
    click.option("--weight", type=float, help=_WEIGHT),
    click.option("--member", "members", multiple=True, help="All of its owners; repeat it."),
    _shown,
    service_options,
)
_member_options = together(
    click.argument("name"),
    click.argument("owners", nargs=-1, required=True, metavar="OWNER..."),
    _shown,
    service_options,
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


@click.command("create")
@_group_options
def create_group(name: str, weight: float | None, members: Members, client: Client) -> GroupRead:
    """Add a group of owners."""
    if any(each.name == name for each in client.groups().groups):
        fail(f"there is a group {name} already: change it with `layout-tuner group set`")
    return client.put_group(name, weight=weight, members=members or None)


@click.command("set")
@_group_options
def set_group(name: str, weight: float | None, members: Members, client: Client) -> GroupRead:
    """Set the weight of a group, or all of its members; one that is new is added."""
    return client.put_group(name, weight=weight, members=members or None)


@click.command()
@_member_options
def add(name: str, owners: Members, client: Client) -> GroupRead:
    """Put owners into a group."""
    return client.add_members(name, owners)


@click.command()
@_member_options
def remove(name: str, owners: Members, client: Client) -> GroupRead:
    """Take owners out of a group."""
    return client.remove_members(name, owners)


@click.command()
@click.argument("name")
@service_options
def delete(name: str, client: Client) -> None:
    """Delete a group; campaigns that were for it are then private."""
    client.delete_group(name)
    click.echo(f"the group {name} is deleted")

"""`layout-tuner token`: create, list, revoke; `layout-tuner whoami`; `layout-tuner audit`."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import TypeAdapter, ValidationError

from layout_tuner.api.formatting import moment
from layout_tuner.api.schemas.access import TokenCreate, TokenPage, TokenRead, WhoAmI
from layout_tuner.cli.options.command_options import json_option
from layout_tuner.cli.options.refusals import fail, refusals
from layout_tuner.cli.service.service_connection import answers, print_json, service_options
from layout_tuner.documents.duration import read_duration_s
from layout_tuner.results_db.actor import TOKEN_ROLES
from layout_tuner.results_db.service_records import AuditEntryRead
from layout_tuner.terminal.text_table import print_table

if TYPE_CHECKING:
    from layout_tuner.client.clients import Client


@click.command()
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(TOKEN_ROLES),
    required=True,
    help="What it may do: viewer reads; submitter also submits campaigns, and changes its own; admin does "
    "everything; worker leases trials and reports them, and nothing else.",
)
@click.option("--owner", help="To whom its campaigns belong.  [default: the token's name]")
@click.option("--expires-in", metavar="TIME", help="When it expires, such as 12h or 90d.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write the token to this new file, open to you alone, and do not print it.",
)
@json_option
@service_options
def create(
    expires_in: str | None, out: Path | None, as_json: bool, client: Client, **wanted: Any
) -> None:
    """Make a token with the NAME of a person or a worker; it is shown this once."""
    until = None if expires_in is None else datetime.now(UTC) + _span(expires_in, "--expires-in")
    try:
        token = TokenCreate(expires_at=until, **wanted)
    except ValidationError as error:
        raise click.UsageError(f"the name of a token: {error.errors()[0]['msg']}") from error
    if out is not None and out.exists():
        raise click.UsageError(f"{out} exists; name a new file with --out")
    if out is not None and not out.parent.is_dir():
        raise click.UsageError(f"there is no directory {out.parent}")
    created = client.create_token(token)
    if out is not None:
        _keep(out, created.token)
    if as_json:
        print_json(TokenRead(**created.model_dump(exclude={"token"})) if out else created)
        return
    click.echo(f"token {created.id} of {created.name}: {_role(created)}", err=True)
    click.echo(f"it is in {out}" if out else created.token, err=out is not None)


@click.command("list")
@click.option("--all", "revoked", is_flag=True, help="Also those that were revoked.")
@answers(lambda page: _print_tokens(page))
@service_options
def list_tokens(revoked: bool, client: Client) -> TokenPage:
    """List tokens, the youngest first; those in the data directory's files are not among them."""
    return client.tokens(revoked=revoked)


def _print_tokens(page: TokenPage) -> None:
    print_table(
        (">id", "name", "owner", "role", "state", "made", "by", "last used"),
        [
            (
                str(each.id),
                each.name,
                each.owner,
                each.role,
                _state(each),
                moment(each.created_at),
                each.created_by,
                moment(each.last_used_at) if each.last_used_at else "never",
            )
            for each in page.tokens
        ],
    )


@click.command()
@click.argument("token_name", metavar="NAME-OR-ID")
@answers(lambda revoked: click.echo(f"token {revoked.id} of {revoked.name} is revoked"))
@service_options
def revoke(token_name: str, client: Client) -> TokenRead:
    """End a token for good: at once, and within two seconds in every process of the service."""
    return client.revoke_token(_id_of(client, token_name))


@click.command()
@answers(
    lambda found: click.echo(
        f"{found.name}: {_role(found)}"
        + (f", in {', '.join(found.groups)}" if found.groups else "")
    )
)
@service_options
def whoami(client: Client) -> WhoAmI:
    """Show the name and the role of the token in use, its owner and the owner's groups."""
    return client.whoami()


def _role(token: TokenRead | WhoAmI) -> str:
    role = f"{token.role} until {moment(token.expires_at)}" if token.expires_at else token.role
    return role if token.owner == token.name else f"{role}, for {token.owner}"


@click.command()
@click.option("--by", "actor", help="Only changes by this name.")
@click.option("--action", help="Only this kind of change, such as campaign.pause.")
@click.option("--of", "target", help="Only changes of the object of this name.")
@click.option("--within", metavar="TIME", help="Only changes within this time, such as 2h or 7d.")
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True)
@json_option
@service_options
def audit(
    actor: str | None,
    action: str | None,
    target: str | None,
    within: str | None,
    limit: int,
    as_json: bool,
    client: Client,
) -> None:
    """List who changed what and when, the youngest change first."""
    since = None if within is None else datetime.now(UTC) - _span(within, "--within")
    found = list(
        islice(client.audit(actor=actor, action=action, target=target, since=since), limit)
    )
    if as_json:
        write = TypeAdapter(AuditEntryRead).dump_json
        click.echo(f"[{', '.join(write(each).decode() for each in found)}]")
        return
    print_table(
        ("when", "who", "role", "from", "what", "of", "details"),
        [
            (
                moment(each.at),
                each.actor,
                each.role,
                each.address,
                each.action,
                each.target,
                ", ".join(
                    f"{name}={value}" for name, value in each.details.items() if value is not None
                ),
            )
            for each in found
        ],
    )


def _id_of(client: Client, named: str) -> int:
    if named.isascii() and named.isdigit():
        return int(named)
    for each in client.tokens().tokens:
        if each.name == named:
            return each.id
    raise click.ClickException(
        f"there is no token named {named!r} that is not revoked; see `layout-tuner token list`"
    )


def _state(token: TokenRead) -> str:
    if token.revoked_at is not None:
        return f"revoked {moment(token.revoked_at)}"
    if not token.is_valid:
        return "expired"
    return f"until {moment(token.expires_at)}" if token.expires_at else "valid"


def _span(text: str, option: str) -> timedelta:
    with refusals():
        return timedelta(seconds=read_duration_s(text, field=option))


def _keep(path: Path, token: str) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{token}\n")
    except OSError as error:
        fail(
            f"the token was made, but cannot be written to {path} ({error.strerror}): revoke it, and "
            "make another"
        )

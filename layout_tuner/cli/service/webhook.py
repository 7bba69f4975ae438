"""`layout-tuner webhook`: list, add, test, remove."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import click

from layout_tuner.api.schemas.access import WebhookCreate, WebhookPage
from layout_tuner.cli.options.refusals import fail
from layout_tuner.cli.service.service_connection import answers, service_options
from layout_tuner.results_db.service_records import (
    NOTICES,
    WEBHOOK_FORMATS,
    WebhookRead,
)
from layout_tuner.terminal.text_table import print_table

if TYPE_CHECKING:
    from layout_tuner.client.clients import Client

_COLUMNS: Final = (">id", "owner", "format", "address", "events", "state", ">given up")
_id = click.argument("webhook_id", type=click.IntRange(min=1), metavar="ID")


@click.command("list")
@answers(lambda page: print_table(_COLUMNS, [*map(_row, page.webhooks)]))
@service_options
def list_webhooks(client: Client) -> WebhookPage:
    """List your webhooks, and how they do; as an admin, those of all owners."""
    return client.webhooks()


def _row(hook: WebhookRead) -> tuple[str, ...]:
    off = hook.off_because and f"off: {hook.off_because}"
    named = (str(hook.id), hook.owner, hook.format, hook.address, ", ".join(hook.events))
    return *named, off or hook.problem or "on", str(hook.num_given_up)


@click.command()
@click.argument("address")
@click.option("--format", type=click.Choice(WEBHOOK_FORMATS), default="standard")
@click.option(
    "--event",
    "events",
    type=click.Choice(NOTICES),
    multiple=True,
    required=True,
    help="What to send; may be repeated.",
)
@answers(lambda made: click.echo(made.secret))
@service_options
def add(client: Client, events: tuple[Any, ...], **given: Any) -> WebhookRead:
    """Have messages sent to ADDRESS; prints the secret that signs them, this once."""
    return client.add_webhook(WebhookCreate.model_construct(events=[*events], **given))


@click.command()
@_id
@service_options
def test(webhook_id: int, client: Client) -> None:
    """Turn a webhook on, send it a test, and wait for the receiver's answer."""
    hook, until = client.test_webhook(webhook_id), time.monotonic() + 15
    while hook.tried_at is None and time.monotonic() < until:
        time.sleep(0.2)
        hook = next((each for each in client.webhooks().webhooks if each.id == hook.id), hook)
    if hook.problem or hook.tried_at is None:
        fail(hook.problem or "no answer yet; see `layout-tuner webhook list`")
    click.echo("delivered")


@click.command()
@_id
@service_options
def remove(webhook_id: int, client: Client) -> None:
    """Delete a webhook, with the messages that wait."""
    client.remove_webhook(webhook_id)

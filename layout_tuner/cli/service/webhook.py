"""`layout-tuner webhook`: list, add, test, remove."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import click

from layout_tuner.api.schemas.webhooks import WebhookChange, WebhookPage
from layout_tuner.cli.options.refusals import fail
from layout_tuner.cli.service.service_connection import answers, service_options
from layout_tuner.results_db.service_records import (
    ADMIN_NOTICES,
    CAMPAIGN_NOTICES,
    WEBHOOK_FORMATS,
    WebhookRead,
)
from layout_tuner.terminal.text_table import print_table

if TYPE_CHECKING:
    from layout_tuner.client.clients import Client

PATIENCE_S: Final = 15.0

_COLUMNS: Final = (">id", "owner", "format", "address", "events", "campaigns", "state", "last")


@click.command("list")
@answers(lambda page: print_table(_COLUMNS, [*map(_row, page.webhooks)]))
@service_options
def list_webhooks(client: Client) -> WebhookPage:
    """List your webhooks with their last messages; as an admin, those of all owners."""
    return client.webhooks()


def _row(hook: WebhookRead) -> tuple[str, ...]:
    last = "".join(f"{each.kind} {each.state} {each.problem}" for each in hook.messages[:1])
    state, events = hook.off_because or "on", ", ".join(hook.events)
    return str(hook.id), hook.owner, hook.format, hook.address, events, hook.campaigns, state, last


@click.command()
@click.argument("address")
@click.option("--format", type=click.Choice(WEBHOOK_FORMATS), default="standard")
@click.option(
    "--event",
    "events",
    type=click.Choice(CAMPAIGN_NOTICES + ADMIN_NOTICES),
    multiple=True,
    default=CAMPAIGN_NOTICES,
    help="What to send; may be repeated. The last two are for admins. [default: the others]",
)
@click.option("--campaigns", default="*", help="Of which campaigns: a name, or a pattern.")
@answers(lambda made: click.echo(made.secret))
@service_options
def add(client: Client, events: tuple[str, ...], **given: Any) -> WebhookRead:
    """Have messages sent to ADDRESS; prints the secret that signs them, this once."""
    return client.add_webhook(WebhookChange.model_construct(events=[*events], **given))


@click.command()
@click.argument("webhook_id", type=click.IntRange(min=1), metavar="ID")
@service_options
def test(webhook_id: int, client: Client) -> None:
    """Send a test message to a webhook, and wait for the receiver's answer."""
    sent, until = client.test_webhook(webhook_id), time.monotonic() + PATIENCE_S
    while sent.state == "waiting" and not sent.problem and time.monotonic() < until:
        time.sleep(0.2)
        last = {each.message_id: each for h in client.webhooks().webhooks for each in h.messages}
        sent = last.get(sent.message_id, sent)
    if sent.state != "delivered":
        fail(sent.problem or "no answer yet; see `layout-tuner webhook list`")
    click.echo("delivered")


@click.command()
@click.argument("webhook_id", type=click.IntRange(min=1), metavar="ID")
@service_options
def remove(webhook_id: int, client: Client) -> None:
    """Delete a webhook, with the messages that wait."""
    client.remove_webhook(webhook_id)

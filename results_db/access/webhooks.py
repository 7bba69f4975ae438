"""Webhooks, and the outbox of their messages.

A message is written in the transaction of its event. A process claims a message for `CLAIM_S`; if
it is killed, another claims it again. So each message arrives at least once. Messages of one
campaign to one webhook are sent in order, each once the earlier ones are delivered or given up.
"""

from __future__ import annotations

import base64
import html
import json
import random
import re
import secrets
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urlsplit
from uuid import NAMESPACE_OID, uuid4, uuid5

from sqlalchemy import exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.errors import WebhookInvalidError, WebhookNotFoundError
from layout_tuner.results_db.models.service_tables import (
    WORKER_ALIVE_S,
    MessageRow,
    WebhookRow,
    WorkerRow,
)
from layout_tuner.results_db.models.table_base import insert_missing
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.results_db.rows import record_of
from layout_tuner.results_db.service_records import Notice, WebhookRead
from layout_tuner.trainers.simulator import SIMULATED_LAUNCHER

CLAIM_S: Final = 30.0
LONGEST_PAUSE_S: Final = 3600.0
DAY: Final = timedelta(days=1)
"""After so long a message is given up."""
LATELY: Final = timedelta(hours=1)
WINDOW: Final = 500
"""Waiting messages of a webhook, the oldest first, among which a claim looks for one that is due:
however many wait, a claim costs the same."""
MAX_WEBHOOKS: Final = 20
"""Most webhooks of an owner."""


class OutgoingMessage(NamedTuple):
    """A claimed message."""

    id: int
    webhook_id: int
    message_id: str
    address: str
    body: str
    secret: str


class Answer(NamedTuple):
    """What became of an attempt to send a message."""

    problem: str = ""
    """Why it failed; empty: the message was delivered."""
    is_gone: bool = False
    """Whether the receiver wants no further message."""
    wait_s: float = 0.0
    """Seconds for which the receiver asks not to be tried again."""


def notify(
    session: Session,
    kind: Notice | Literal["webhook.test"],
    *,
    now: datetime,
    data: Mapping[str, Any],
    owner: str | None = None,
    campaign: Campaign | None = None,
    key: str | None = None,
    webhook_id: int | None = None,
) -> None:
    """Writes a message for every webhook that asks for an event, in the event's transaction.

    Only webhooks that were there at `now` get it: those of `owner`, or of the owner of `campaign`,
    or all; a test is for the webhook of an id alone. An event that may be found twice has a `key`,
    and makes one message. `data["text"]` is the sentence for people.
    """
    query = select(WebhookRow).where(WebhookRow.off_because == "", WebhookRow.created_at <= now)
    # A test waits for no other message: its queue is its own.
    queue = 0 if webhook_id is None else -1 - secrets.randbelow(1 << 30)
    if campaign is not None:
        owner, queue = campaign.created_by, campaign.id
        data = {"campaign": campaign.name, "campaign_id": campaign.id, **data}
    if owner is not None:
        query = query.where(WebhookRow.owner == owner)
    message_id = uuid4() if key is None else uuid5(NAMESPACE_OID, f"{kind} {key}")
    row = {"message_id": f"msg_{message_id.hex}", "campaign_id": queue, "kind": kind}
    row |= {"at": now, "next_at": now, "data": dict(data)}
    found = session.scalars(query)
    hooks = [each for each in found if kind in each.events or each.id == webhook_id]
    insert_missing(session, MessageRow, [row | {"webhook_id": hook.id} for hook in hooks])


class Webhooks(StoreSection):
    """The store's methods for webhooks and their messages."""

    def all(self) -> list[WebhookRead]:
        """The webhooks of the actor's owner; for an administrator those of all."""
        with self._db.read() as session:
            rows = session.scalars(select(WebhookRow).where(*self._own()).order_by(WebhookRow.id))
            return [record_of(WebhookRead, row, secret=None) for row in rows]

    @retried
    def add(self, /, **given: Any) -> WebhookRead:
        """Makes a webhook, whose record has its secret; WebhookInvalidError beyond the limit.

        `given` are the address, the format, the events, and the address of links in messages.
        """
        owner = self._actor.owner
        secret = f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"
        with self._db.write() as session:
            own = select(func.count()).where(WebhookRow.owner == owner)
            if (session.scalar(own) or 0) >= MAX_WEBHOOKS:
                raise WebhookInvalidError(f"an owner has at most {MAX_WEBHOOKS} webhooks")
            row = WebhookRow(owner=owner, created_at=self._clock(), signing_secret=secret, **given)
            session.add(row)
            session.flush()
            # Addresses of chats are secrets themselves: the audit has the host alone.
            said = {"host": urlsplit(row.address).hostname, "events": row.events}
            self._audit(session, "webhook.add", "webhook", row.id, **said)
            return record_of(WebhookRead, row, secret=secret)

    @retried
    def delete(self, webhook_id: int) -> None:
        """Deletes a webhook with its messages; WebhookNotFoundError if the owner has none."""
        with self._db.write() as session:
            session.delete(self._of(session, webhook_id))
            self._audit(session, "webhook.delete", "webhook", webhook_id)

    @retried
    def test(self, webhook_id: int) -> WebhookRead:
        """Turns a webhook on, and sends it a message; WebhookNotFoundError without it."""
        with self._db.write() as session:
            hook = self._of(session, webhook_id)
            hook.off_because, hook.problem, hook.tried_at = "", "", None
            data = {"text": f"A test of webhook {hook.id}, by {self._actor.name}"}
            notify(session, "webhook.test", now=self._clock(), data=data, webhook_id=hook.id)
            return record_of(WebhookRead, hook, secret=None)

    @retried
    def claim(self, busy: Collection[int]) -> list[OutgoingMessage]:
        """A message of each webhook that is on and not busy: the caller has `CLAIM_S` for it."""
        now, other = self._clock(), aliased(MessageRow)
        of_webhook = (MessageRow.webhook_id == WebhookRow.id, MessageRow.state == "waiting")
        window = select(MessageRow).where(*of_webhook).order_by(MessageRow.id).limit(WINDOW)
        each = aliased(MessageRow, window.correlate(WebhookRow).subquery())
        has_earlier = exists().where(
            other.webhook_id == each.webhook_id,
            other.campaign_id == each.campaign_id,
            other.state == "waiting",
            other.id < each.id,
        )
        first = select(each.id).where(each.next_at <= now, ~has_earlier).order_by(each.id).limit(1)
        may_send = (WebhookRow.off_because == "", WebhookRow.id.not_in(busy))
        with self._db.read() as session:
            found = session.scalars(select(first.scalar_subquery()).where(*may_send)).all()
        ids = [id_ for id_ in found if id_ is not None]
        claimed: list[OutgoingMessage] = []
        if not ids:
            return claimed
        # Another process may have claimed or settled some meanwhile.
        query = (
            select(MessageRow, WebhookRow)
            .join(WebhookRow)
            .where(MessageRow.id.in_(ids), MessageRow.state == "waiting", MessageRow.next_at <= now)
        )
        with self._db.write() as session:
            locked = query.with_for_update(skip_locked=True, of=MessageRow)
            for row, hook in session.execute(locked):
                row.attempts += 1
                row.next_at = now + timedelta(seconds=CLAIM_S)
                named = (row.id, hook.id, row.message_id, hook.address)
                claimed.append(OutgoingMessage(*named, _body(row, hook), hook.signing_secret))
        return claimed

    @retried
    def settle(self, message_id: int, answer: Answer, *, pause_s: float) -> None:
        """Notes the answer to a claimed message.

        Pauses double from `pause_s` on, and vary by half. A receiver that is gone turns its webhook
        off.
        """
        now = self._clock()
        with self._db.write() as session:
            row = session.get(MessageRow, message_id)
            if row is None or row.state != "waiting":
                return  # deleted meanwhile, or delivered by another process
            hook = session.get_one(WebhookRow, row.webhook_id)
            hook.tried_at, hook.problem = now, answer.problem[:300]
            pause_s *= 2.0 ** min(row.attempts - 1, 30) * random.uniform(0.5, 1.5)  # noqa: S311
            pause_s = min(max(pause_s, answer.wait_s), LONGEST_PAUSE_S)
            row.next_at = now + timedelta(seconds=pause_s)
            if not answer.problem:
                row.state = "delivered"
            elif answer.is_gone:
                hook.off_because = hook.problem
                self._audit(session, "webhook.off", "webhook", hook.id, because=hook.problem)
            elif row.next_at - row.at > DAY:
                row.state = "given up"
                hook.num_given_up += 1

    @retried
    def note_lost_workers(self, since: datetime) -> datetime:
        """Sends word of workers whose heartbeats have stopped after `since`, once for each stop.

        Returns the moment up to which all losses are known, the next call's `since`.
        """
        until = self._clock() - timedelta(seconds=WORKER_ALIVE_S)
        stopped = (WorkerRow.seen_at > since) & (WorkerRow.seen_at <= until)
        is_lost = (WorkerRow.ended_at.is_(None), stopped, WorkerRow.launcher != SIMULATED_LAUNCHER)
        if self._scalar(select(WorkerRow.id).where(*is_lost)) is None:
            return until  # as mostly: no lock is taken
        with self._db.write() as session:
            for each in session.scalars(select(WorkerRow).where(*is_lost)):
                data = {"cluster": each.cluster, "node": each.host, "num_nodes": each.num_nodes}
                data["text"] = f"The worker on {each.host} of cluster {each.cluster} is lost"
                key = f"{each.id} {each.seen_at.isoformat()}"
                notify(session, "worker.lost", now=each.seen_at, key=key, data=data)
        return until

    def last_ends(self) -> dict[int, int]:
        """`Campaign.last_ended_seq` by id, of those whose owners may get word of a new winner."""
        lately = or_(Campaign.ended_at.is_(None), Campaign.ended_at > self._clock() - LATELY)
        owners = select(WebhookRow.owner).where(WebhookRow.off_because == "")
        ends = select(Campaign.id, Campaign.last_ended_seq)
        with self._db.read() as session:
            found = session.execute(ends.where(lately, Campaign.created_by.in_(owners)))
            return {each.id: each.last_ended_seq for each in found}

    @retried
    def note_winners(self, winners: Mapping[int, tuple[str, int, float]]) -> None:
        """Sends word of the winners of campaigns, of each layout once.

        Their layout keys, the numbers of their trials and their values are by the campaigns' ids.
        """
        now = self._clock()
        with self._db.write() as session:
            for each in session.scalars(select(Campaign).where(Campaign.id.in_(winners))):
                layout_key, number, value = winners[each.id]
                data = {"trial": number, "value": value, "objective": each.objective}
                data["text"] = f"Campaign {each.name} has a new winner: trial {number}"
                said: dict[str, Any] = {"campaign": each, "key": f"{each.id} {layout_key}"}
                notify(session, "campaign.new_winner", now=now, data=data, **said)

    def _own(self) -> tuple[Any, ...]:
        return () if self._actor.sees_all else (WebhookRow.owner == self._actor.owner,)

    def _of(self, session: Session, webhook_id: int) -> WebhookRow:
        query = select(WebhookRow).where(WebhookRow.id == webhook_id, *self._own())
        if (row := session.scalar(query)) is None:
            raise WebhookNotFoundError(f"there is no webhook {webhook_id}; list those that are")
        return row


def _body(row: MessageRow, hook: WebhookRow) -> str:
    """The body of a message in the format of its webhook.

    Slack makes links and mentions of what stands in <>, and no formats without mrkdwn; Mattermost
    always reads Markdown, and makes mentions of names after @.
    """
    url = f"{hook.link}/campaigns/{row.campaign_id}" if row.campaign_id > 0 else f"{hook.link}/"
    text = html.escape(row.data["text"], quote=False)
    body: dict[str, Any] = {"type": row.kind, "timestamp": row.at.isoformat()}
    if hook.format == "slack":
        body = {"text": f"{text}\n{url}", "mrkdwn": False}
    elif hook.format == "mattermost":
        text = re.sub(r"([\\`*_~#|()\[\]])", r"\\\1", text).replace("@", "@\N{ZERO WIDTH SPACE}")
        body = {"text": f"{text}\n{url}"}
    else:
        body["data"] = row.data | {"url": url}
    return json.dumps(body, separators=(",", ":"))

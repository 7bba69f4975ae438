"""Webhooks, and the outbox of their messages.

A message is written in the transaction of its event. A process claims the first waiting message of
each queue (those of one campaign to one webhook) for `CLAIM_S`; if it is killed, another claims it
again. So each message arrives at least once, and those of a campaign in order.
"""

from __future__ import annotations

import base64
import json
import random
import re
import secrets
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit
from uuid import NAMESPACE_OID, uuid4, uuid5

from sqlalchemy import exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from layout_tuner.results_db.access.visibility import may_see
from layout_tuner.results_db.database.locks import lock_rows
from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.errors import WebhookInvalidError, WebhookNotFoundError
from layout_tuner.results_db.models.service_tables import (
    WORKER_ALIVE_S,
    EventRow,
    MessageRow,
    WebhookRow,
    WorkerRow,
)
from layout_tuner.results_db.models.table_base import insert_missing
from layout_tuner.results_db.models.tables import Campaign, Trial
from layout_tuner.results_db.rows import record_of
from layout_tuner.results_db.service_records import (
    ADMIN_NOTICES,
    CAMPAIGN_NOTICES,
    WEBHOOK_FORMATS,
    WebhookMessageRead,
    WebhookRead,
)
from layout_tuner.trainers.simulator import SIMULATED_LAUNCHER

CLAIM_S: Final = 30.0
LONGEST_PAUSE_S: Final = 3600.0
DAY: Final = timedelta(days=1)
"""After so long a message is given up, and messages are no longer signed with a former secret."""
LATELY: Final = timedelta(hours=1)
MAX_WEBHOOKS: Final = 20
"""Most webhooks of an owner."""


class OutgoingMessage(NamedTuple):
    """A claimed message."""

    id: int
    webhook_id: int
    message_id: str
    address: str
    body: bytes
    secrets: list[str]


def notify(
    session: Session,
    kind: str,
    *,
    now: datetime,
    data: Mapping[str, Any],
    owner: str | None = None,
    campaign: Campaign | None = None,
    key: str | None = None,
    since: datetime | None = None,
) -> None:
    """Writes a message for every webhook that asks for an event, in the event's transaction.

    `owner`: for that owner's webhooks alone. `campaign`: for those whose owners may see it. `key`:
    of an event that may be found twice; it makes one message. `since`: for webhooks made before it.
    `data["text"]` is the sentence for people.
    """
    query = select(WebhookRow).where(WebhookRow.off_because == "")
    if owner is not None:
        query = query.where(WebhookRow.owner == owner)
    if since is not None:
        query = query.where(WebhookRow.created_at <= since)
    if campaign is not None:
        query = query.join(Campaign, Campaign.id == campaign.id).where(may_see(WebhookRow.owner))
        data = {"campaign": campaign.name, "campaign_id": campaign.id} | dict(data)
    message_id = f"msg_{(uuid4() if key is None else uuid5(NAMESPACE_OID, f'{kind} {key}')).hex}"
    row = {"message_id": message_id, "campaign_id": campaign.id if campaign else 0, "kind": kind}
    row |= {"at": now, "next_at": now, "data": dict(data)}
    hooks = [hook for hook in session.scalars(query) if kind in hook.events]
    if campaign is not None:
        hooks = [hook for hook in hooks if fnmatchcase(campaign.name, hook.campaigns)]
    insert_missing(session, MessageRow, [row | {"webhook_id": hook.id} for hook in hooks])


class Webhooks(StoreSection):
    """The store's methods for webhooks and their messages."""

    def all(self) -> list[WebhookRead]:
        """The webhooks of the actor's owner; for an administrator those of all."""
        with self._db.read() as session:
            rows = session.scalars(select(WebhookRow).where(*self._own()).order_by(WebhookRow.id))
            return [_record(session, row) for row in rows]

    @retried
    def put(self, webhook_id: int | None, /, *, rotate: bool, **given: Any) -> WebhookRead:
        """Makes a webhook (None) or changes one; the record has its secret where that is new.

        Raises:
            WebhookNotFoundError: the owner has none of this id.
            WebhookInvalidError: its events or format cannot be, or the owner has too many.
        """
        now, secret = self._clock(), None
        with self._db.write() as session:
            if webhook_id is None:
                row = WebhookRow(owner=self._actor.owner, created_at=now, off_because="", **given)
                row.secret, row.former_secret, row.former_until = "", "", now
                own = select(func.count()).where(WebhookRow.owner == row.owner)
                if (session.scalar(own) or 0) >= MAX_WEBHOOKS:
                    raise WebhookInvalidError(f"an owner has at most {MAX_WEBHOOKS} webhooks")
                session.add(row)
            else:
                row = self._of(session, webhook_id)
            for name, value in given.items():
                setattr(row, name, value)
            known = CAMPAIGN_NOTICES + (ADMIN_NOTICES if self._actor.sees_all else ())
            for field, values, valid in (
                ("events", row.events or [""], known),
                ("format", [row.format], WEBHOOK_FORMATS),
            ):
                if unknown := [each for each in values if each not in valid]:
                    raise WebhookInvalidError(
                        f"{field} {unknown[0][:80]!r} is not one of {', '.join(valid)}"
                    )
            if rotate:
                secret = "whsec_" + base64.b64encode(secrets.token_bytes(32)).decode()
                row.former_secret, row.former_until = row.secret, now + DAY
                row.secret = secret
            session.flush()
            # Addresses of chats are secrets themselves: the audit has the host alone.
            changed = {"host": urlsplit(row.address).hostname, "events": row.events}
            self._audit(session, "webhook.put", "webhook", row.id, **changed, new_secret=rotate)
            return _record(session, row, secret)

    @retried
    def delete(self, webhook_id: int) -> None:
        """Deletes a webhook with its messages; WebhookNotFoundError if the owner has none."""
        with self._db.write() as session:
            session.delete(self._of(session, webhook_id))
            self._audit(session, "webhook.delete", "webhook", webhook_id)

    @retried
    def test(self, webhook_id: int) -> WebhookMessageRead:
        """Sends a message to try a webhook; WebhookNotFoundError if the owner has none."""
        now, message_id = self._clock(), f"msg_{uuid4().hex}"
        with self._db.write() as session:
            hook = self._of(session, webhook_id)
            data = {"text": f"A test of webhook {hook.id}, by {self._actor.name}"}
            row = MessageRow(message_id=message_id, webhook_id=hook.id, kind="webhook.test")
            # A queue of its own: it does not wait for others.
            row.campaign_id, row.at, row.next_at, row.data = -1, now, now, data
            session.add(row)
            session.flush()
            return record_of(WebhookMessageRead, row)

    @retried
    def claim(self, busy: Collection[int]) -> list[OutgoingMessage]:
        """The next message of each webhook that is not busy: the caller has `CLAIM_S` for it."""
        now, other = self._clock(), aliased(MessageRow)
        is_due = (MessageRow.state == "waiting", MessageRow.next_at <= now)
        has_earlier = exists().where(
            other.state == "waiting",
            other.webhook_id == MessageRow.webhook_id,
            other.campaign_id == MessageRow.campaign_id,
            other.id < MessageRow.id,
        )
        may_send = (WebhookRow.off_because == "", WebhookRow.id.not_in(busy), ~has_earlier)
        first = select(func.min(MessageRow.id)).join(WebhookRow).where(*is_due, *may_send)
        with self._db.read() as session:
            ids = session.scalars(first.group_by(WebhookRow.id)).all()
        claimed: list[OutgoingMessage] = []
        if not ids:
            return claimed
        query = select(MessageRow, WebhookRow).join(WebhookRow)
        query = query.where(MessageRow.id.in_(ids), *is_due)
        with self._db.write() as session:
            locked = query.with_for_update(skip_locked=True, of=MessageRow)
            for row, hook in session.execute(locked):
                there = select(may_see(hook.owner)).where(Campaign.id == row.campaign_id)
                gone = select(may_see(hook.owner, EventRow))  # of a deleted campaign
                gone = gone.where(EventRow.campaign_id == row.campaign_id).limit(1)
                if False in (session.scalar(there), session.scalar(gone)):
                    row.state, row.problem = "given up", "its owner may not see the campaign now"
                    continue
                row.attempts += 1
                row.next_at = now + timedelta(seconds=CLAIM_S)
                keys = [hook.secret]
                if hook.former_secret and now < hook.former_until:
                    keys.append(hook.former_secret)
                named = (row.id, hook.id, row.message_id)
                claimed.append(OutgoingMessage(*named, hook.address, _body(row, hook), keys))
        return claimed

    @retried
    def settle(self, message_id: int, problem: str, *, pause_s: float, is_gone: bool) -> None:
        """Notes the answer to a claimed message; without a problem it was delivered.

        Pauses double from the first one on, and vary by half. A receiver that is gone turns its
        webhook off.
        """
        now = self._clock()
        with self._db.write() as session:
            row = session.get(MessageRow, message_id)
            if row is None or row.state != "waiting":
                return  # deleted meanwhile, or delivered by another process
            row.problem = problem[:300]
            pause_s = min(pause_s * 2.0 ** min(row.attempts - 1, 30), LONGEST_PAUSE_S)
            row.next_at = now + timedelta(seconds=pause_s * random.uniform(0.5, 1.5))  # noqa: S311
            if not problem:
                row.state = "delivered"
            elif is_gone:
                session.get_one(WebhookRow, row.webhook_id).off_because = problem
                self._audit(session, "webhook.off", "webhook", row.webhook_id, because=problem)
            elif row.next_at - row.at > DAY:
                row.state = "given up"

    @retried
    def note_lost_workers(self) -> None:
        """Sends word of workers whose heartbeats have stopped, once for each stop."""
        now = self._clock()
        lately = WorkerRow.seen_at.between(now - LATELY, now - timedelta(seconds=WORKER_ALIVE_S))
        real = WorkerRow.launcher != SIMULATED_LAUNCHER
        with self._db.write() as session:
            for each in session.scalars(
                select(WorkerRow).where(WorkerRow.ended_at.is_(None), lately, real)
            ):
                data = {"cluster": each.cluster, "node": each.host, "num_nodes": each.num_nodes}
                data["text"] = f"The worker on {each.host} of cluster {each.cluster} is lost"
                key = f"{each.id} {each.seen_at.isoformat()}"
                notify(session, "worker.lost", now=now, key=key, since=each.seen_at, data=data)

    def watched(self) -> tuple[set[str], dict[int, int]]:
        """The events that webhooks ask for; campaigns that may have a new winner, and their ends.

        The numbers of the last ends (`Campaign.last_ended_seq`) are by the campaigns' ids.
        """
        lately = or_(Campaign.ended_at.is_(None), Campaign.ended_at > self._clock() - LATELY)
        with self._db.read() as session:
            events = session.scalars(select(WebhookRow.events).where(WebhookRow.off_because == ""))
            asked = {event for each in events for event in each}
            if "campaign.new_winner" not in asked:
                return asked, {}
            ends = session.execute(select(Campaign.id, Campaign.last_ended_seq).where(lately))
            return asked, {each.id: each.last_ended_seq for each in ends}

    @retried
    def note_winner(self, campaign_id: int, layout_key: str, number: int, value: float) -> None:
        """Sends word of the winner of a campaign, unless the last word was of the same layout."""
        with self._db.write() as session:
            earlier = select(MessageRow.data).where(
                MessageRow.campaign_id == campaign_id, MessageRow.kind == "campaign.new_winner"
            )
            trial = (Trial.campaign_id == campaign_id, Trial.number == number)
            for campaign in lock_rows(session, Campaign, Campaign.id == campaign_id):
                last = session.scalar(earlier.order_by(MessageRow.id.desc()).limit(1))
                if last is not None and last["layout_key"] == layout_key:
                    return
                said = {"trial": number, "value": value, "objective": campaign.objective}
                said["text"] = f"Campaign {campaign.name} has a new winner: trial {number}"
                said["layout_key"], now = layout_key, self._clock()
                since = session.scalar(select(Trial.ended_at).where(*trial))
                given: dict[str, Any] = {"now": now, "since": since, "campaign": campaign}
                notify(session, "campaign.new_winner", data=said, **given)

    def _own(self) -> tuple[Any, ...]:
        return () if self._actor.sees_all else (WebhookRow.owner == self._actor.owner,)

    def _of(self, session: Session, webhook_id: int) -> WebhookRow:
        query = select(WebhookRow).where(WebhookRow.id == webhook_id, *self._own())
        if (row := session.scalar(query)) is None:
            raise WebhookNotFoundError(f"there is no webhook {webhook_id}; list those that are")
        return row


def _record(session: Session, row: WebhookRow, secret: str | None = None) -> WebhookRead:
    query = select(MessageRow).where(MessageRow.webhook_id == row.id)
    last = session.scalars(query.order_by(MessageRow.id.desc()).limit(5))
    messages = [record_of(WebhookMessageRead, each) for each in last]
    return record_of(WebhookRead, row, messages=messages, secret=secret)


def _body(row: MessageRow, hook: WebhookRow) -> bytes:
    """The body of a message in the format of its webhook.

    In Slack &, < and > make links and mentions; in Mattermost also Markdown and @ do.
    """
    url = f"{hook.link}/campaigns/{row.campaign_id}" if row.campaign_id > 0 else f"{hook.link}/"
    text = str(row.data.get("text") or f"{row.kind}: {json.dumps(row.data)}")
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = text.replace("@", "@\N{ZERO WIDTH SPACE}")
    if hook.format == "mattermost":
        text = re.sub(r"([\\`*_~#|()\[\]])", r"\\\1", text)
    body: dict[str, Any] = {"text": f"{text}\n<{url}|Open it>"}
    if hook.format == "standard":
        body = {"type": row.kind, "timestamp": row.at.isoformat(), "data": row.data | {"url": url}}
    return json.dumps(body, separators=(",", ":")).encode()

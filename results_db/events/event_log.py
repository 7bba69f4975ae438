"""The event log: reading in order, numbering on PostgreSQL, pruning, and versions of pages.

Decision 34 explains why numbers are assigned after the commit, and what readers can rely on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any, Final, cast

from sqlalchemy import CursorResult, Integer, bindparam, delete, exists, func, select, text, update
from sqlalchemy.orm import aliased

from layout_tuner.results_db.database.database import rows_deleted
from layout_tuner.results_db.database.events import COUNTER_ID
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.models.service_tables import EventCounter, EventRow
from layout_tuner.results_db.models.tables import Campaign, Trial
from layout_tuner.results_db.records import EventRead
from layout_tuner.results_db.rows import record_of

MAX_NUMBERED: Final = 5000
"""Most events that one transaction numbers."""

MAX_PRUNED: Final = 1000
"""Most events that one transaction deletes, since other writers wait."""

_NUMBERING_LOCK: Final = 0x6C74_6576
"""PostgreSQL's advisory lock for numbering."""


_COLUMNS: Final = tuple(getattr(EventRow, each.name) for each in fields(EventRead))

_OF_CAMPAIGN: Final = EventRow.campaign_id == bindparam("campaign", type_=Integer)

_NEWEST: Final = (
    select(EventRow.seq, EventRow.at)
    .where(_OF_CAMPAIGN, EventRow.seq.is_not(None))
    .order_by(EventRow.seq.desc())
    .limit(1)
)

_UNNUMBERED: Final = (
    select(EventRow.id).where(_OF_CAMPAIGN, EventRow.seq.is_(None)).order_by(EventRow.id)
)

_LEASED_UNTIL: Final = select(func.max(Trial.lease_expires_at)).where(
    Trial.campaign_id == bindparam("campaign", type_=Integer), Trial.state == "RUNNING"
)


class EventLog(StoreSection):
    """The store's methods for events."""

    def find(self, *, after: int, campaign_id: int | None = None, limit: int) -> list[EventRead]:
        """Numbered events after a number, in order; after 0, from the first that is stored."""
        query = select(*_COLUMNS).where(EventRow.seq > after).order_by(EventRow.seq).limit(limit)
        if campaign_id is not None:
            query = query.where(EventRow.campaign_id == campaign_id)
        with self._db.read() as session:
            return [record_of(EventRead, row) for row in session.execute(query)]

    def newest(self, campaign_id: int, *, before: int | None = None, limit: int) -> list[EventRead]:
        """Numbered events of a campaign, the newest first."""
        query = (
            select(*_COLUMNS)
            .where(EventRow.campaign_id == campaign_id, EventRow.seq.is_not(None))
            .order_by(EventRow.seq.desc())
            .limit(limit)
        )
        if before is not None:
            query = query.where(EventRow.seq < before)
        with self._db.read() as session:
            return [record_of(EventRead, row) for row in session.execute(query)]

    def end(self, campaign_id: int) -> int | None:
        """The number of a campaign's last event; None: it has not ended, or its end has no number.

        The newest event of a campaign is never deleted.
        """
        other = aliased(EventRow)
        waits = exists().where(
            other.campaign_id == campaign_id, other.kind == "campaign.ended", other.seq.is_(None)
        )
        query = (
            select(func.max(EventRow.seq))
            .join(Campaign, Campaign.id == EventRow.campaign_id)
            .where(Campaign.id == campaign_id, Campaign.ended_at.is_not(None), ~waits)
        )
        with self._db.read() as session:
            return session.scalar(query)

    def last_seq(self) -> int:
        """The last number that was assigned; 0: none."""
        return self._counter().last_seq

    def pruned_seq(self) -> int:
        """The last number that was deleted; readers that are further behind may miss events."""
        return self._counter().pruned_seq

    def _counter(self) -> EventCounter:
        with self._db.read() as session:
            return session.get_one(EventCounter, COUNTER_ID)

    def prune(self, before: datetime) -> int:
        """Deletes events from before a point in time, and returns their number.

        The newest event of each campaign stays: versions of pages depend on it.
        """
        total = last = 0
        # Selected outside the deleting transaction: an old event cannot become the newest again.
        while old := self._old_events(before, after=last):
            last = old[-1]
            with self._db.write() as session:
                session.execute(
                    update(EventCounter)
                    .where(EventCounter.id == COUNTER_ID, EventCounter.pruned_seq < last)
                    .values(pruned_seq=last)
                )
                total += rows_deleted(session, delete(EventRow).where(EventRow.seq.in_(old)))
        return total

    def number(self) -> int:
        """Numbers the events that were committed since the last call, and returns how many.

        Any number of processes may call it at once: one does the work, the others find nothing to
        do.
        """
        if not self._db.is_shared:
            return 0
        with self._db.read() as session:
            # Most calls find nothing, and take no lock.
            if session.scalar(select(EventRow.id).where(EventRow.seq.is_(None)).limit(1)) is None:
                return 0
        with self._db.write() as session:
            # In its own statement, so that the next one sees everything committed before the lock.
            lock = select(func.pg_try_advisory_xact_lock(_NUMBERING_LOCK))
            if not session.scalar(lock):
                return 0
            numbered = session.execute(_NUMBER, {"most": MAX_NUMBERED, "counter": COUNTER_ID})
            return cast("CursorResult[Any]", numbered).rowcount

    def _old_events(self, before: datetime, *, after: int) -> Sequence[int]:
        """Numbers of the next events to delete: older, and not the newest of their campaign."""
        newer = aliased(EventRow)
        is_succeeded = exists().where(
            newer.campaign_id == EventRow.campaign_id, newer.seq > EventRow.seq
        )
        query = (
            select(EventRow.seq)
            .where(EventRow.seq > after, EventRow.at < before, is_succeeded)
            .order_by(EventRow.seq)
            .limit(MAX_PRUNED)
        )
        with self._db.read() as session:
            return [seq for seq in session.scalars(query) if seq is not None]

    def page_version(self, campaign_id: int, *, beats: bool = False) -> str:
        """A text that changes whenever a page of the campaign would change.

        With `beats`, also the values that heartbeats change: finished iterations, cost.
        """
        with self._db.read() as session:
            parts = [str(campaign_id)]
            # With the time: after a restore of the database, a number may be assigned again.
            for seq, at in session.execute(_NEWEST, {"campaign": campaign_id}):
                parts += [str(seq), _microseconds(at)]
            # SQLite numbers events as they are written.
            if self._db.is_shared:
                unnumbered = session.execute(_UNNUMBERED, {"campaign": campaign_id})
                parts += [f"+{id_}" for (id_,) in unnumbered]
            version = " ".join(parts)
            if not beats:
                return version
            # The latest end of a lease changes with every heartbeat.
            leased_until = session.scalar(_LEASED_UNTIL, {"campaign": campaign_id})
            return f"{version} {'' if leased_until is None else _microseconds(leased_until)}"


_NUMBER: Final = text(
    """
    WITH fresh AS (
        SELECT id, row_number() OVER (ORDER BY id) AS place
        FROM (SELECT id FROM events WHERE seq IS NULL ORDER BY id LIMIT :most) AS oldest
    ), counter AS (
        UPDATE event_counter SET last_seq = last_seq + (SELECT count(*) FROM fresh)
        WHERE id = :counter
        RETURNING last_seq - (SELECT count(*) FROM fresh) AS before
    )
    UPDATE events SET seq = counter.before + fresh.place
    FROM fresh, counter
    WHERE events.id = fresh.id
    """
)
"""Numbers the oldest events without a number, in one statement: it runs ten times a second."""


def _microseconds(at: datetime) -> str:
    return f"{at.timestamp():.6f}"

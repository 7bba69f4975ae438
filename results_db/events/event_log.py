"""The log of events: read in order, gone on after a number, and numbered on PostgreSQL.

Decision 34 says why numbers are given after the commit, and what a reader may rely on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, cast

from sqlalchemy import CursorResult, Row, delete, exists, func, select, text, update
from sqlalchemy.orm import Session, aliased

from results_db.event_tables import EventCounter, EventRow
from results_db.events import COUNTER_ID, EventKind
from results_db.part import StorePart

MAX_NUMBERED: Final = 5000
"""Events that are given their numbers in one transaction, at most."""

MAX_PRUNED: Final = 1000
"""Events that one transaction deletes, at most: others wait for it."""

_NUMBERING_LOCK: Final = 0x6C74_6576
"""PostgreSQL's advisory lock of whoever gives numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRecord:
    """Something that happened to a campaign."""

    seq: int
    """Its number; a reader goes on after the last that it saw."""
    campaign_id: int
    trial_id: int | None
    kind: EventKind
    at: datetime
    data: Mapping[str, Any]


class EventLog(StorePart):
    """The events' part of the store."""

    def events(
        self, *, after: int, campaign_id: int | None = None, limit: int
    ) -> list[EventRecord]:
        """Numbered events after a number, in order.

        Args:
            after: the last number that was seen; 0: from the first that is kept.
            campaign_id: only those of one campaign; None: of all.
            limit: at most so many.
        """
        query = select(*_COLUMNS).where(EventRow.seq > after).order_by(EventRow.seq).limit(limit)
        if campaign_id is not None:
            query = query.where(EventRow.campaign_id == campaign_id)
        with self._db.read() as session:
            return [_record(row) for row in session.execute(query)]

    def last_event_seq(self) -> int:
        """The last number that was given; 0 before the first."""
        query = select(EventCounter.last_seq).where(EventCounter.id == COUNTER_ID)
        with self._db.read() as session:
            return session.scalars(query).one()

    def pruned_event_seq(self) -> int:
        """The last number that is kept no more: who goes on after an earlier one may miss events."""
        query = select(EventCounter.pruned_seq).where(EventCounter.id == COUNTER_ID)
        with self._db.read() as session:
            return session.scalars(query).one()

    def prune_events(self, before: datetime) -> int:
        """Deletes events from before a point in time; how many there were.

        The newest of each campaign stays: pages are told apart by it.
        """
        total = last = 0
        # Found outside the transaction that deletes them: what is old does not become the newest again.
        while old := self._old_events(before, after=last):
            last = old[-1]
            with self._db.write() as session:
                session.execute(
                    update(EventCounter)
                    .where(EventCounter.id == COUNTER_ID, EventCounter.pruned_seq < last)
                    .values(pruned_seq=last)
                )
                gone = session.execute(
                    delete(EventRow).where(EventRow.seq.in_(old)),
                    execution_options={"synchronize_session": False},
                )
                total += cast("CursorResult[Any]", gone).rowcount
        return total

    def number_events(self) -> int:
        """Gives the events that were committed since their numbers; how many there were.

        Any number of processes may do it at once: one of them does, the others find nothing to do.
        """
        if not self._gives_numbers_late():
            return 0
        with self._db.read() as session:
            # Most looks find nothing, and take no lock.
            if session.scalar(_unnumbered().limit(1)) is None:
                return 0
        with self._db.write() as session:
            # In a statement of its own: the next one sees what was committed before the lock was there.
            lock = select(func.pg_try_advisory_xact_lock(_NUMBERING_LOCK))
            return _number(session) if session.scalar(lock) else 0

    def count_unnumbered_events(self) -> int:
        """Events that were committed and have no number yet."""
        with self._db.read() as session:
            query = select(func.count()).where(EventRow.seq.is_(None))
            return session.scalar(query) or 0

    def _old_events(self, before: datetime, *, after: int) -> Sequence[int]:
        """The next numbers of events that go: older than that, and not the newest of their campaign."""
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

    def _gives_numbers_late(self) -> bool:
        return self._db.engine.dialect.name != "sqlite"


_COLUMNS: Final = (
    EventRow.seq,
    EventRow.campaign_id,
    EventRow.trial_id,
    EventRow.kind,
    EventRow.at,
    EventRow.data,
)


def _unnumbered() -> Any:
    return select(EventRow.id).where(EventRow.seq.is_(None)).order_by(EventRow.id)


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
"""Gives the oldest events without a number theirs, in one statement: it runs ten times a second."""


def _number(session: Session) -> int:
    numbered = session.execute(_NUMBER, {"most": MAX_NUMBERED, "counter": COUNTER_ID})
    return cast("CursorResult[Any]", numbered).rowcount


def _record(row: Row[Any]) -> EventRecord:
    return EventRecord(
        seq=row.seq,
        campaign_id=row.campaign_id,
        trial_id=row.trial_id,
        kind=cast("EventKind", row.kind),
        at=row.at,
        data=row.data,
    )

"""Events: written in the transaction of the change, numbered in the order for readers.

A reader continues after the last number that it saw. On PostgreSQL, transactions may commit in
another order than they draw numbers from a sequence, and a reader would miss an event that commits
late. There, events get their numbers after the commit. SQLite has one writer at a time, and numbers
events as they are written.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import repeat
from typing import Any, Final

from sqlalchemy import update
from sqlalchemy.orm import Session, object_session

from layout_tuner.results_db.models.service_tables import EventCounter, EventRow
from layout_tuner.results_db.models.table_base import insert_many
from layout_tuner.results_db.models.tables import Campaign, Trial
from layout_tuner.results_db.records import EventKind

COUNTER_ID: Final = 1

_UNWRITTEN: Final = "events of this transaction"


def tell(trial: Trial, kind: EventKind, now: datetime) -> None:
    """Appends an event of a trial to the transaction in which the trial was loaded."""
    session = object_session(trial)
    assert session is not None  # it was loaded or added there
    emit(
        session,
        trial.campaign_id,
        kind,
        now=now,
        trial_id=trial.id,
        number=trial.number,
        state=trial.state,
        reason=trial.reason,
        attempt=trial.attempt,
    )


def emit(
    session: Session,
    campaign_id: int,
    kind: EventKind,
    *,
    now: datetime,
    trial_id: int | None = None,
    of: Campaign | None = None,
    **data: Any,
) -> None:
    """Appends an event to the transaction; readers see it after the commit.

    `of` is a campaign that this transaction deletes: who saw it may see the event.
    """
    event = {
        "campaign_id": campaign_id,
        "trial_id": trial_id,
        "kind": kind,
        "at": now,
        "data": data,
        "owner": None if of is None else of.created_by,
        "visibility": None if of is None else of.visibility,
        "group_name": None if of is None else of.group,
    }
    session.info.setdefault(_UNWRITTEN, []).append(event)


def write_events(session: Session) -> None:
    """Writes the appended events in one statement, at the end of every writing transaction."""
    events: list[dict[str, Any]] = session.info.pop(_UNWRITTEN, [])
    if not events:
        return
    seqs: Iterable[int | None] = repeat(None)
    if session.get_bind().dialect.name == "sqlite":
        last = session.execute(
            update(EventCounter)
            .where(EventCounter.id == COUNTER_ID)
            .values(last_seq=EventCounter.last_seq + len(events))
            .returning(EventCounter.last_seq)
        ).scalar_one()
        seqs = range(last - len(events) + 1, last + 1)
    rows = [{"seq": seq, **event} for seq, event in zip(seqs, events, strict=False)]
    insert_many(session, EventRow, rows)

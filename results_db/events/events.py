"""Events: written in the transaction of the change, numbered in the order in which readers see them.

A reader goes on after the last number that it saw. On PostgreSQL transactions commit in another order
than they take numbers from a sequence, and such a reader would miss what committed late: there an event
has no number until `results_db` gives it one after the commit. SQLite has one writer at a time, and
numbers events as they are written.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import repeat
from typing import Any, Final, Literal

from sqlalchemy import update
from sqlalchemy.orm import Session, object_session

from results_db.event_tables import EventCounter, EventRow
from results_db.many_rows import insert_many
from results_db.models import Trial

EventKind = Literal[
    "campaign.created",
    "campaign.changed",
    "campaign.paused",
    "campaign.resumed",
    "campaign.ended",
    "campaign.deleted",
    "trial.added",
    "trial.leased",
    "trial.returned",
    "trial.ended",
    "trial.judged",
    "campaign.analysed",
]

COUNTER_ID: Final = 1

_UNWRITTEN: Final = "events of this transaction"


def tell(trial: Trial, kind: EventKind, now: datetime) -> None:
    """Appends an event of a trial to the transaction that it was loaded in."""
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
    **data: Any,
) -> None:
    """Appends an event to the transaction; readers see it once that has committed."""
    event = {
        "campaign_id": campaign_id,
        "trial_id": trial_id,
        "kind": kind,
        "at": now,
        "data": data,
    }
    session.info.setdefault(_UNWRITTEN, []).append(event)


def write_events(session: Session) -> None:
    """Writes what was appended, in one statement; every writing transaction ends with it."""
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

"""What the database holds of outcomes that were posted, and of events that were heard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, select

from benchmarks.service.load_watchers import ReceivedEvents
from layout_tuner.results_db.models.service_tables import EventRow
from layout_tuner.results_db.models.tables import (
    Attempt,
    BreakdownRow,
    EnvironmentRow,
    IterationRow,
    MeasurementRow,
    StageMemoryRow,
    Trial,
    TrialLog,
)
from layout_tuner.results_db.store import Store

_NUM_ITERATIONS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeFaults:
    """Trials whose outcome is not in the database as it was posted."""

    lost: int
    """Not COMPLETED with everything that was posted (figures, iterations, stages, breakdown, log,
    environment), or completed in the database and never posted."""
    twice: int
    """More than one attempt, or more than one event of their end."""


def check_outcomes(store: Store, posted: Mapping[int, float]) -> OutcomeFaults:
    """Looks every outcome up.

    Args:
        store: the database.
        posted: the tokens_per_s that were posted, by trial.
    """
    whole = dict(
        _rows(
            store,
            select(Trial.id, MeasurementRow.tokens_per_s)
            .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
            .where(
                Trial.state == "COMPLETED",
                _count(IterationRow, IterationRow.trial_id) == _NUM_ITERATIONS,
                _count(StageMemoryRow, StageMemoryRow.trial_id) == Trial.pp,
                _count(BreakdownRow, BreakdownRow.trial_id) == 1,
                _count(EnvironmentRow, EnvironmentRow.trial_id) == 1,
                _count(TrialLog, TrialLog.trial_id) == 1,
            ),
        )
    )
    # Events have no index by trial: they are counted in one go.
    ended = (
        select(EventRow.trial_id, func.count().label("times"))
        .where(EventRow.kind == "trial.ended")
        .group_by(EventRow.trial_id)
        .subquery()
    )
    twice = _rows(
        store,
        select(Trial.id)
        .outerjoin(ended, ended.c.trial_id == Trial.id)
        .where(
            Trial.state == "COMPLETED",
            (_count(Attempt, Attempt.trial_id) != 1) | (func.coalesce(ended.c.times, 0) != 1),
        ),
    )
    lost = {trial for trial in {*posted, *whole} if posted.get(trial) != whole.get(trial)}
    return OutcomeFaults(lost=len(lost), twice=len(twice))


def missed_events(store: Store, heard: Sequence[ReceivedEvents]) -> int:
    """Events that a watcher did not hear as the database holds them, in their order."""
    missed = 0
    for one in heard:
        held = store.events.find(after=one.after, campaign_id=one.campaign, limit=1 << 20)
        expected = [event.seq for event in held]
        if one.after < 0 or one.seqs != expected:
            missed += max(len(set(expected) ^ set(one.seqs)), 1)
    return missed


def _count(table: type, trial_id: ColumnElement[int], *also: ColumnElement[bool]):  # type: ignore[no-untyped-def]
    query = select(func.count()).select_from(table).where(trial_id == Trial.id, *also)
    return query.correlate(Trial).scalar_subquery()


def _rows(store: Store, query):  # type: ignore[no-untyped-def]
    with store._db.read() as session:
        return session.execute(query).all()

"""Many rows at once are kept as one by one; those that the database refuses harm no others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from results_db.database.retry import one_by_one_if_refused
from results_db.errors import (
    DatabaseConflictError,
    DatabaseUnavailableError,
    MeasurementInvalidError,
    ResultsDbError,
    RowRefusedError,
    TrialNotFoundError,
    ValueUnstorableError,
)
from results_db.models.base import insert_many
from results_db.models.service_tables import EventRow
from results_db.models.tables import Attempt, IterationRow
from results_db.store import Store
from search_spaces.protocol.worker_messages import OutcomeReply, OutcomeReport
from search_spaces.spec.layout import Layout
from tests.kit.store import completed, lease_one, make_campaign, make_worker, run_trial
from tests.results_db.legal_history import wrong_leaderboards

NUM_REPORTS = 5
POISONED = 2


class Work:
    """Doubles numbers; a batch with the 2 in it fails."""

    def __init__(self, broken: Exception | None) -> None:
        self.broken = broken
        self.batches: list[list[int]] = []

    def __call__(self, asks: Sequence[int]) -> list[int | ResultsDbError]:
        self.batches.append(list(asks))
        if 2 in asks and self.broken is not None:
            raise self.broken
        return [2 * ask for ask in asks]


def test_of_a_batch_that_is_refused_each_call_runs_alone_and_one_gets_the_error() -> None:
    broken = IntegrityError("INSERT", {}, Exception("CHECK constraint failed: counters"))
    for error in (None, ValueUnstorableError("too long"), broken):
        work = Work(error)
        first, refused, last = one_by_one_if_refused(work, [1, 2, 3])
        assert (first, last) == (2, 6)
        assert work.batches == [[1, 2, 3], *([] if error is None else [[1], [2], [3]])]
        if error is broken:
            assert isinstance(refused, RowRefusedError)
            assert "CHECK constraint failed: counters" in str(refused)
            assert refused.__cause__ is broken
        else:
            assert refused == (error or 4)


def test_an_unreachable_database_fails_the_batch_without_single_tries() -> None:
    for error in (DatabaseUnavailableError("away"), DatabaseConflictError("both")):
        work = Work(error)
        with pytest.raises(type(error)):
            one_by_one_if_refused(work, [1, 2, 3])
        assert work.batches == [[1, 2, 3]]


def make_reports(store: Store) -> list[OutcomeReport]:
    """Outcomes of trials that run."""
    campaign, worker = make_campaign(store), make_worker(store)
    reports = []
    for number in range(1, NUM_REPORTS + 1):
        layout = Layout(micro_batch_size=number)
        store.trials.add(campaign, layout)
        lease = lease_one(store, worker.id)
        reports.append(
            OutcomeReport(
                trial_id=lease.trial_id,
                worker_id=worker.id,
                attempt=lease.attempt,
                outcome=completed(layout),
            )
        )
    return reports


def less_than_nothing(report: OutcomeReport) -> OutcomeReport:
    return replace(report, nodes_held=-1.0)


def named_without_end(report: OutcomeReport) -> OutcomeReport:
    """An outcome refuses such a node itself: this is one that slipped through."""
    outcome = replace(report.outcome)
    object.__setattr__(outcome, "node", "n" * 300)
    return replace(report, outcome=outcome)


def peaked_below_zero(report: OutcomeReport) -> OutcomeReport:
    """A measurement refuses it too."""
    measured = replace(report.outcome.measurement)
    object.__setattr__(measured, "peak_memory_bytes", -1)
    return replace(report, outcome=replace(report.outcome, measurement=measured))


@pytest.mark.parametrize(
    ("poison", "refusal"),
    [
        (less_than_nothing, MeasurementInvalidError),
        (named_without_end, ValueUnstorableError),
        (peaked_below_zero, RowRefusedError),
    ],
)
def test_one_outcome_of_a_batch_is_refused(
    store: Store, poison: object, refusal: type[ResultsDbError]
) -> None:
    reports = make_reports(store)
    reports[POISONED] = poison(reports[POISONED])  # type: ignore[operator]
    reports.append(replace(reports[0], trial_id=9999))
    answers = store.outcomes.post_all(reports)
    assert isinstance(answers[POISONED], refusal)
    assert isinstance(answers[-1], TrialNotFoundError)
    for place, report in enumerate(reports[:-1]):
        state = store.trials.get(report.trial_id).state
        if place == POISONED:
            assert state == "RUNNING", "nothing of it was kept"
        else:
            assert answers[place] == OutcomeReply(accepted=True, state="COMPLETED"), place
            assert state == "COMPLETED"
    assert wrong_leaderboards(store) == []


NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
TEXTS = ["plain", "tab\tand\nline", "back\\slash \\N \\.", "", "quote \" and '", "ü 🚀"]
"""What a format that separates by tabs and escapes with backslashes might get wrong."""


@pytest.fixture
def trial_id(store: Store) -> int:
    """A trial that was measured, without the rows of its iterations."""
    trial_id = run_trial(store, make_campaign(store))
    with store._db.write() as session:
        session.execute(delete(IterationRow))
    return trial_id


def iteration(trial_id: int, index: int, /, **changes: Any) -> dict[str, Any]:
    row = {"kind": "timed", "step_time_s": 0.1, "loss": 3.0, "grad_norm": None}
    return {"trial_id": trial_id, "index": index, **row} | changes


def event(campaign_id: int, seq: int, text: str) -> dict[str, Any]:
    return {
        "seq": seq,
        "campaign_id": campaign_id,
        "trial_id": None,
        "kind": "trial.added",
        "at": NOON + timedelta(microseconds=seq),
        "data": {"text": text, "nested": [1, None, {"deep": True}]},
    }


@contextmanager
def nothing_is_kept(
    store: Store, expected: type[Exception], why: str | None = None
) -> Iterator[Session]:
    with pytest.raises(expected, match=why), store._db.write() as session:
        yield session
    with store._db.read() as session:
        assert not session.scalar(select(func.count()).select_from(IterationRow))


def test_what_is_kept_is_what_was_given_in_its_order(store: Store) -> None:
    for number in (0, 1, 3, 60):
        given = [event(9, seq, TEXTS[seq % len(TEXTS)]) for seq in range(1, number + 1)]
        with store._db.write() as session:
            session.execute(delete(EventRow))
            insert_many(session, EventRow, given)
        with store._db.read() as session:
            kept = session.scalars(select(EventRow).order_by(EventRow.id))
            assert [{name: getattr(row, name) for name in event(9, 1, "")} for row in kept] == given


def test_figures_are_kept_to_the_bit_whole_ones_among_them(store: Store, trial_id: int) -> None:
    losses = [math.pi, 1e-300, 7, 0.1 + 0.2, 2**53 + 1.0]
    rows = [iteration(trial_id, index, loss=loss) for index, loss in enumerate(losses)]
    rows[1]["grad_norm"] = 1.5
    with store._db.write() as session:
        insert_many(session, IterationRow, rows)
    with store._db.read() as session:
        kept = session.scalars(select(IterationRow).order_by(IterationRow.index)).all()
        assert [row.loss for row in kept] == losses
        assert [row.grad_norm for row in kept] == [None, 1.5, None, None, None]


def test_columns_that_are_not_given_get_their_defaults(store: Store, trial_id: int) -> None:
    worker = make_worker(store, "another")
    told = {"trial_id": trial_id, "worker_id": worker.id, "started_at": NOON, "seen_at": NOON}
    lost = {"ended_at": NOON, "ending": "lost", "waiting_because": ""}
    with store._db.write() as session:
        insert_many(session, Attempt, [{**told, **lost, "attempt": n} for n in range(2, 6)])
    later = Attempt.attempt > 1
    with store._db.read() as session:
        assert list(session.scalars(select(Attempt.node_seconds).where(later))) == [0.0] * 4
        assert list(session.scalars(select(Attempt.lost_node_seconds).where(later))) == [0.0] * 4


def test_one_refused_row_refuses_all_for_its_own_reason(store: Store, trial_id: int) -> None:
    some = [iteration(trial_id, index) for index in range(4)]
    nul = "a text cannot be kept: .* holds a NUL character"
    for row, error, why in (
        (iteration(trial_id, 2), IntegrityError, None),
        (iteration(trial_id + 1, 9), IntegrityError, None),
        (iteration(trial_id, 9, kind="t" * 300), ValueUnstorableError, "a text has 300 characters"),
        (iteration(trial_id, 9, kind="a\0b"), ValueUnstorableError, nul),
        (iteration(trial_id, 2**31), ValueUnstorableError, "2147483648 is beyond"),
    ):
        with nothing_is_kept(store, error, why) as session:
            insert_many(session, IterationRow, [*some, row])


def test_a_lost_connection_is_told_and_the_next_one_works(store: Store, trial_id: int) -> None:
    if not store.is_shared:
        pytest.skip("a file has no connection to lose")
    rows = [iteration(trial_id, index) for index in range(5)]
    with nothing_is_kept(store, DatabaseUnavailableError) as session:
        lost = session.scalar(select(func.pg_backend_pid()))
        with store._db.write() as other:
            other.execute(select(func.pg_terminate_backend(lost, 5000)))
        insert_many(session, IterationRow, rows)
    with store._db.write() as session:
        insert_many(session, IterationRow, rows)
        session.execute(delete(IterationRow))

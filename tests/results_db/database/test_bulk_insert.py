"""Many rows at once are kept as they would be one by one, and refused for the same reasons."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from results_db.database.bulk_insert import insert_many
from results_db.errors import DatabaseUnavailableError, ValueUnstorableError
from results_db.models.service_tables import EventRow
from results_db.models.tables import Attempt, IterationRow
from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.store import completed, lease_one, make_campaign, make_worker, post_outcome

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
TEXTS = ["plain", "tab\tand\nline", "back\\slash \\N \\.", "", "quote \" and '", "ü 🚀"]
"""What a format that separates by tabs and escapes with backslashes might get wrong."""


@pytest.fixture
def trial_id(store: Store) -> int:
    """A trial that was measured, without the rows of its iterations."""
    layout = Layout(num_microbatches=8)
    trial_id = store.trials.add(make_campaign(store), layout).id
    lease = lease_one(store, make_worker(store).id)
    assert post_outcome(store, trial_id, lease.attempt, completed(layout)).accepted
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


@pytest.mark.parametrize("number", [0, 1, 2, 3, 60])
def test_what_is_kept_is_what_was_given_in_its_order(store: Store, number: int) -> None:
    given = [event(9, seq, TEXTS[seq % len(TEXTS)]) for seq in range(1, number + 1)]
    with store._db.write() as session:
        insert_many(session, EventRow, given)
    with store._db.read() as session:
        kept = session.scalars(
            select(EventRow).where(EventRow.campaign_id == 9).order_by(EventRow.id)
        )
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


def test_a_row_that_a_constraint_refuses_is_the_refusal_of_all(store: Store, trial_id: int) -> None:
    rows = [iteration(trial_id, index) for index in (0, 1, 2, 2)]
    with nothing_is_kept(store, IntegrityError) as session:
        insert_many(session, IterationRow, rows)


def test_rows_of_nothing_are_refused(store: Store, trial_id: int) -> None:
    rows = [iteration(trial_id + 1, index) for index in range(5)]
    with nothing_is_kept(store, IntegrityError) as session:
        insert_many(session, IterationRow, rows)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"kind": "t" * 300}, "a text has 300 characters"),
        ({"kind": "a\0b"}, "a text cannot be kept: .* holds a NUL character"),
        ({"index": 2**31}, "2147483648 is beyond"),
    ],
)
def test_what_cannot_be_kept_is_refused_in_the_words_of_a_single_row(
    store: Store, trial_id: int, change: dict[str, Any], why: str
) -> None:
    rows = [*(iteration(trial_id, index) for index in range(4)), iteration(trial_id, 9, **change)]
    with nothing_is_kept(store, ValueUnstorableError, why) as session:
        insert_many(session, IterationRow, rows)


def test_a_connection_that_is_lost_meanwhile_is_told_as_such_and_the_next_one_works(
    store: Store, trial_id: int
) -> None:
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

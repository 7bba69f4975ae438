"""Batches with a member that the database refuses: the others are answered as if it were absent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from sqlalchemy.exc import IntegrityError

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
from results_db.store import Store
from search_spaces.protocol.worker_messages import OutcomeReply, OutcomeReport
from search_spaces.spec.layout import Layout
from tests.kit.store import completed, lease_one, make_campaign, make_worker
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
    assert report.outcome.measurement is not None
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

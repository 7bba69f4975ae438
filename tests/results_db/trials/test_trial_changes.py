from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import select

from results_db.actor import Actor
from results_db.errors import (
    CampaignStateError,
    TrialLogNotFoundError,
    TrialNotFoundError,
    TrialStateError,
)
from results_db.models.service_tables import AuditRow, EventRow
from results_db.records import TrialRecord
from results_db.store import Store
from search_spaces.protocol.worker_messages import BeatBody
from search_spaces.spec.layout import Layout
from tests.kit.store import completed, failed, lease_one, make_campaign, make_worker

pytestmark = pytest.mark.sqlite_is_enough

PLAIN = Layout()


@pytest.fixture
def campaign(store: Store) -> int:
    return make_campaign(store)


@pytest.fixture
def worker(store: Store) -> str:
    return make_worker(store).id


def ended(store: Store, campaign: int, worker: str, reason: str | None = None) -> TrialRecord:
    """A trial of the plain layout that has ended."""
    trial = store.add_trial(campaign, PLAIN)
    lease = lease_one(store, worker)
    outcome = completed(PLAIN) if reason is None else failed(reason)
    store.post_outcome(trial.id, lease.attempt, outcome)
    return store.trial(trial.id)


def audit(store: Store) -> list[tuple[str, str, str, dict[str, Any]]]:
    query = select(AuditRow).where(AuditRow.target_kind == "trial").order_by(AuditRow.id)
    with store._db.read() as session:
        return [(r.actor, r.action, r.target, r.details) for r in session.scalars(query)]


def test_a_completed_trial_is_measured_again_as_often_as_wished(
    store: Store, campaign: int, worker: str
) -> None:
    trial = ended(store, campaign, worker)
    physics = store.by(Actor(name="physics", role="submitter"))
    added = physics.measure_again(trial.id, times=3)
    assert [(t.number, t.state, t.repeat_of, t.repeat_index) for t in added] == [
        (2, "PENDING", trial.id, 1),
        (3, "PENDING", trial.id, 2),
        (4, "PENDING", trial.id, 3),
    ]
    assert {t.layout for t in added} == {PLAIN}
    assert audit(store) == [
        (
            "physics",
            "trial.repeat",
            str(trial.id),
            {"campaign": "first", "number": 1, "added": [2, 3, 4]},
        )
    ]


@pytest.mark.parametrize("reason", ["crashed", "out_of_memory"])
def test_what_failed_is_queued_again_and_not_measured_again(
    store: Store, campaign: int, worker: str, reason: str
) -> None:
    trial = ended(store, campaign, worker, reason)
    with pytest.raises(TrialStateError, match="only a COMPLETED one is measured again: requeue it"):
        store.measure_again(trial.id)
    again = store.requeue_trial(trial.id)
    assert (again.number, again.state, again.repeat_of) == (2, "PENDING", trial.id)
    assert store.trial(trial.id).state == trial.state, "the first keeps its end"
    assert [entry[1] for entry in audit(store)] == ["trial.requeue"]


def test_a_completed_trial_is_not_queued_again(store: Store, campaign: int, worker: str) -> None:
    trial = ended(store, campaign, worker)
    with pytest.raises(TrialStateError, match=r"COMPLETED; only a FAILED, .* repeat it"):
        store.requeue_trial(trial.id)
    assert audit(store) == []


def test_a_wish_that_comes_twice_queues_one_trial(store: Store, campaign: int, worker: str) -> None:
    trial = ended(store, campaign, worker, "crashed")
    store.requeue_trial(trial.id)
    with pytest.raises(TrialStateError, match="trial number 2 is of the same layout, and PENDING"):
        store.requeue_trial(trial.id)
    store.cancel_trial(store.trials(campaign)[1].id)
    assert store.requeue_trial(trial.id).number == 3


def test_a_cancelled_trial_can_be_queued_again(store: Store, campaign: int, worker: str) -> None:
    trial = store.add_trial(campaign, PLAIN)
    cancelled = store.cancel_trial(trial.id)
    assert (cancelled.state, cancelled.reason) == ("CANCELLED", "cancelled")
    assert cancelled.message == "cancelled by the user"
    again = store.requeue_trial(trial.id)
    lease = lease_one(store, worker)
    assert lease.trial_id == again.id, "the cancelled one is leased no more"
    store.post_outcome(again.id, lease.attempt, completed(PLAIN))
    assert store.trial(again.id).state == "COMPLETED"


def test_a_running_trial_is_cancelled_through_its_worker(
    store: Store, campaign: int, worker: str
) -> None:
    trial = store.add_trial(campaign, PLAIN)
    lease = lease_one(store, worker)
    assert store.cancel_trial(trial.id).state == "RUNNING"
    assert store.cancel_trial(trial.id).state == "RUNNING", "twice is once"
    beat = BeatBody(trial_id=trial.id, attempt=lease.attempt, iterations_done=1)
    assert list(store.heartbeat(worker, [beat]).stop) == [trial.id]
    store.post_outcome(trial.id, lease.attempt, failed("cancelled"))
    assert store.trial(trial.id).state == "CANCELLED"
    assert store.cancel_trial(trial.id).state == "CANCELLED", "once more is no error"
    assert [entry[1] for entry in audit(store)] == ["trial.cancel"]


def test_a_cancelled_trial_that_loses_its_worker_is_not_tried_again(
    store: Store, campaign: int, worker: str
) -> None:
    trial = store.add_trial(campaign, PLAIN)
    lease_one(store, worker)
    store.cancel_trial(trial.id)
    store.drain_worker(worker)
    assert store.trial(trial.id).state == "CANCELLED"


@pytest.mark.parametrize("wish", ["measure_again", "requeue_trial"])
def test_an_open_trial_is_not_repeated(store: Store, campaign: int, worker: str, wish: str) -> None:
    trial = store.add_trial(campaign, PLAIN)
    for _ in range(2):
        with pytest.raises(TrialStateError, match=r"is (PENDING|RUNNING); only"):
            getattr(store, wish)(trial.id)
        if store.trial(trial.id).state == "PENDING":
            lease_one(store, worker)


def test_a_campaign_that_has_ended_takes_no_repeats(
    store: Store, campaign: int, worker: str
) -> None:
    good = ended(store, campaign, worker)
    bad = store.add_trial(campaign, Layout(tp=2))
    store.post_outcome(bad.id, lease_one(store, worker).attempt, failed("crashed"))
    store.cancel_campaign(campaign)
    with pytest.raises(CampaignStateError, match="takes no trials"):
        store.measure_again(good.id, times=2)
    with pytest.raises(CampaignStateError, match="takes no trials"):
        store.requeue_trial(bad.id)
    assert len(store.trials(campaign)) == 2


def test_what_is_not_there_is_not_changed(store: Store) -> None:
    for wish in (store.measure_again, store.requeue_trial, store.cancel_trial, store.trial_log):
        with pytest.raises(TrialNotFoundError, match="there is no trial 7"):
            wish(7)


def test_wishes_are_told_as_events(store: Store, campaign: int, worker: str) -> None:
    trial = ended(store, campaign, worker)
    (again,) = store.measure_again(trial.id)
    store.cancel_trial(again.id)
    query = select(EventRow.kind).where(EventRow.trial_id == again.id).order_by(EventRow.id)
    with store._db.read() as session:
        assert list(session.scalars(query)) == ["trial.added", "trial.ended"]


@pytest.mark.sqlite_is_enough(False)
def test_wishes_at_once_number_their_trials_one_after_the_other(
    store: Store, campaign: int, worker: str
) -> None:
    trial = ended(store, campaign, worker)
    errors: list[Exception] = []

    def wish() -> None:
        try:
            for _ in range(5):
                store.measure_again(trial.id)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=wish) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    repeats = store.trials(campaign)[1:]
    assert [t.number for t in repeats] == list(range(2, 22))
    assert sorted(t.repeat_index for t in repeats) == list(range(1, 21))


def test_a_log_is_read_alone_and_where_none_is_kept_that_is_said(
    store: Store, campaign: int, worker: str
) -> None:
    trial = store.add_trial(campaign, PLAIN)
    with pytest.raises(TrialLogNotFoundError, match="PENDING and has no log: it comes with"):
        store.trial_log(trial.id)
    store.post_outcome(trial.id, lease_one(store, worker).attempt, failed("crashed"))
    assert store.trial_log(trial.id) == "Traceback ..."
    other = store.add_trial(campaign, Layout(tp=2))
    store.cancel_trial(other.id)
    with pytest.raises(TrialLogNotFoundError, match="CANCELLED and has no log: its ranks printed"):
        store.trial_log(other.id)

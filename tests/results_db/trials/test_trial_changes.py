from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
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
from tests.kit.store import (
    completed,
    failed,
    lease_one,
    post_outcome,
    run_trial,
    send_beats,
)

pytestmark = pytest.mark.sqlite_is_enough

PLAIN = Layout()


def ended(store: Store, campaign: int, reason: str | None = None) -> TrialRecord:
    """A trial of the plain layout that has ended."""
    outcome = None if reason is None else failed(reason)
    return store.trials.get(run_trial(store, campaign, PLAIN, outcome))


def audit(store: Store) -> list[tuple[str, str, str, dict[str, Any]]]:
    query = select(AuditRow).where(AuditRow.target_kind == "trial").order_by(AuditRow.id)
    with store._db.read() as session:
        return [(r.actor, r.action, r.target, r.details) for r in session.scalars(query)]


def test_a_completed_trial_is_measured_again_as_often_as_wished(
    store: Store, campaign: int, worker: str
) -> None:
    trial = ended(store, campaign)
    physics = store.by(Actor(name="physics", role="submitter"))
    added = physics.trials.measure_again(trial.id, times=3)
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
    trial = ended(store, campaign, reason)
    with pytest.raises(TrialStateError, match="only a COMPLETED one is measured again: requeue it"):
        store.trials.measure_again(trial.id)
    again = store.trials.requeue(trial.id)
    assert (again.number, again.state, again.repeat_of) == (2, "PENDING", trial.id)
    assert store.trials.get(trial.id).state == trial.state, "the first keeps its end"
    assert [entry[1] for entry in audit(store)] == ["trial.requeue"]


def test_a_completed_trial_is_not_queued_again(store: Store, campaign: int, worker: str) -> None:
    trial = ended(store, campaign)
    with pytest.raises(TrialStateError, match=r"COMPLETED; only a FAILED, .* repeat it"):
        store.trials.requeue(trial.id)
    assert audit(store) == []


def test_a_wish_that_comes_twice_queues_one_trial(store: Store, campaign: int, worker: str) -> None:
    trial = ended(store, campaign, "crashed")
    store.trials.requeue(trial.id)
    with pytest.raises(TrialStateError, match="trial number 2 is of the same layout, and PENDING"):
        store.trials.requeue(trial.id)
    store.trials.cancel(store.trials.find(campaign)[1].id)
    assert store.trials.requeue(trial.id).number == 3


def test_a_cancelled_trial_can_be_queued_again(store: Store, campaign: int, worker: str) -> None:
    trial = store.trials.add(campaign, PLAIN)
    cancelled = store.trials.cancel(trial.id)
    assert (cancelled.state, cancelled.reason) == ("CANCELLED", "cancelled")
    assert cancelled.message == "cancelled by the user"
    again = store.trials.requeue(trial.id)
    lease = lease_one(store, worker)
    assert lease.trial_id == again.id, "the cancelled one is leased no more"
    post_outcome(store, again.id, lease.attempt, completed(PLAIN))
    assert store.trials.get(again.id).state == "COMPLETED"


def test_a_running_trial_is_cancelled_through_its_worker(
    store: Store, campaign: int, worker: str
) -> None:
    trial = store.trials.add(campaign, PLAIN)
    lease = lease_one(store, worker)
    assert store.trials.cancel(trial.id).state == "RUNNING"
    assert store.trials.cancel(trial.id).state == "RUNNING", "twice is once"
    beat = BeatBody(trial_id=trial.id, attempt=lease.attempt, iterations_done=1)
    assert list(send_beats(store, worker, [beat]).stop) == [trial.id]
    post_outcome(store, trial.id, lease.attempt, failed("cancelled"))
    assert store.trials.get(trial.id).state == "CANCELLED"
    assert store.trials.cancel(trial.id).state == "CANCELLED", "once more is no error"
    assert [entry[1] for entry in audit(store)] == ["trial.cancel"]


def test_a_cancelled_trial_that_loses_its_worker_is_not_tried_again(
    store: Store, campaign: int, worker: str
) -> None:
    trial = store.trials.add(campaign, PLAIN)
    lease_one(store, worker)
    store.trials.cancel(trial.id)
    store.workers.drain(worker)
    assert store.trials.get(trial.id).state == "CANCELLED"


@pytest.mark.parametrize("wish", ["measure_again", "requeue"])
def test_an_open_trial_is_not_repeated(store: Store, campaign: int, worker: str, wish: str) -> None:
    trial = store.trials.add(campaign, PLAIN)
    for _ in range(2):
        with pytest.raises(TrialStateError, match=r"is (PENDING|RUNNING); only"):
            getattr(store.trials, wish)(trial.id)
        if store.trials.get(trial.id).state == "PENDING":
            lease_one(store, worker)


def test_a_campaign_that_has_ended_takes_no_repeats(
    store: Store, campaign: int, worker: str
) -> None:
    good = ended(store, campaign)
    bad = run_trial(store, campaign, Layout(tp=2), failed())
    store.campaigns.cancel(campaign)
    with pytest.raises(CampaignStateError, match="takes no trials"):
        store.trials.measure_again(good.id, times=2)
    with pytest.raises(CampaignStateError, match="takes no trials"):
        store.trials.requeue(bad)
    assert len(store.trials.find(campaign)) == 2


def test_what_is_not_there_is_not_changed(store: Store) -> None:
    for wish in (
        store.trials.measure_again,
        store.trials.requeue,
        store.trials.cancel,
        store.trials.log,
    ):
        with pytest.raises(TrialNotFoundError, match="there is no trial 7"):
            wish(7)


def test_wishes_are_told_as_events(store: Store, campaign: int, worker: str) -> None:
    trial = ended(store, campaign)
    (again,) = store.trials.measure_again(trial.id)
    store.trials.cancel(again.id)
    query = select(EventRow.kind).where(EventRow.trial_id == again.id).order_by(EventRow.id)
    with store._db.read() as session:
        assert list(session.scalars(query)) == ["trial.added", "trial.ended"]


@pytest.mark.sqlite_is_enough(False)
def test_wishes_at_once_number_their_trials_one_after_the_other(
    store: Store, campaign: int, worker: str
) -> None:
    trial = ended(store, campaign)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(store.trials.measure_again, [trial.id] * 20))
    repeats = store.trials.find(campaign)[1:]
    assert [t.number for t in repeats] == list(range(2, 22))
    assert sorted(t.repeat_index for t in repeats) == list(range(1, 21))


def test_a_log_is_read_alone_and_where_none_is_kept_that_is_said(
    store: Store, campaign: int, worker: str
) -> None:
    trial = store.trials.add(campaign, PLAIN)
    with pytest.raises(TrialLogNotFoundError, match="PENDING and has no log: it comes with"):
        store.trials.log(trial.id)
    post_outcome(store, trial.id, lease_one(store, worker).attempt, failed())
    assert store.trials.log(trial.id) == "Traceback ..."
    other = store.trials.add(campaign, Layout(tp=2))
    store.trials.cancel(other.id)
    with pytest.raises(TrialLogNotFoundError, match="CANCELLED and has no log: its ranks printed"):
        store.trials.log(other.id)

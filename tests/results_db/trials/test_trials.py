"""Trials: what is kept of them, and what users wish of them."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError

from results_db.actor import Actor
from results_db.errors import (
    CampaignNotFoundError,
    CampaignStateError,
    TrialDuplicateError,
    TrialLogNotFoundError,
    TrialNotFoundError,
    TrialStateError,
)
from results_db.models.service_tables import AuditRow, EventRow
from results_db.models.tables import Campaign
from results_db.records import REPEAT_REASONS, TrialRecord
from results_db.store import Store
from search_spaces.protocol.worker_messages import BeatBody
from search_spaces.spec.layout import Layout
from tests.kit.store import (
    ODD,
    completed,
    failed,
    lease_one,
    make_campaign,
    make_environment,
    make_measurement,
    post_outcome,
    ranked_trials,
    run_trial,
    send_beats,
    take_leases,
)

pytestmark = pytest.mark.sqlite_is_enough


@pytest.mark.sqlite_is_enough(False)
def test_a_layout_is_kept_whole_and_tried_once_in_a_campaign(store: Store, campaign: int) -> None:
    trial = store.trials.add(campaign, ODD)
    assert trial.layout == ODD == store.trials.get(trial.id).layout
    assert trial.layout_key == ODD.key
    assert (trial.state, trial.number, trial.attempt) == ("PENDING", 1, 0)
    with pytest.raises(TrialDuplicateError, match=ODD.key):
        store.trials.add(campaign, ODD)
    store.trials.add(make_campaign(store, "other"), ODD)
    # The refused one took no number.
    assert store.trials.add(campaign, Layout()).number == 2
    with pytest.raises(CampaignNotFoundError, match="no campaign 9"):
        store.trials.add(9, ODD)


def test_a_repeat_says_which_trial_it_repeats(store: Store, campaign: int, worker: str) -> None:
    first = run_trial(store, campaign)
    second = store.trials.get(run_trial(store, campaign, outcome=failed()))
    assert (second.repeat_of, second.repeat_index, second.number) == (first, 1, 2)
    assert store.trials.repeat(second.id).repeat_index == 2


def test_a_repeat_keeps_its_reason_and_a_users_is_a_request(store: Store, campaign: int) -> None:
    first = run_trial(store, campaign)
    crashed = run_trial(store, campaign, Layout(tp=2), outcome=failed())
    assert store.trials.get(first).repeat_reason is None
    for reason in REPEAT_REASONS:
        again = store.trials.repeat(first, reason=reason)
        assert store.trials.get(again.id).repeat_reason == reason
    (asked,) = store.trials.measure_again(first)
    assert (asked.repeat_reason, store.trials.requeue(crashed).repeat_reason) == ("request",) * 2


FP16: dict[str, Any] = {
    "iterations": tuple(
        dataclasses.replace(each, grad_norm=None if each.index == 0 else each.grad_norm)
        for each in make_measurement(Layout(pp=2)).iterations
    ),
    "skipped_steps": 1,
    "warmup_settled": False,
    "peak_reserved_bytes_by_stage": (7 << 30, 6 << 30),
}
"""What fp16 on a GPU adds to a measurement."""


@pytest.mark.sqlite_is_enough(False)
def test_a_completed_trial_keeps_all_that_was_measured(store: Store, campaign: int) -> None:
    for layout, changes in (
        (Layout(pp=4), {}),
        (Layout(pp=2, precision="fp16"), FP16),
        (Layout(), {"others_share": 0.25, "throttled": True}),
        (Layout(dp=2), {"breakdown": None}),
        (Layout(tp=2), {"shortened": True, "iterations_asked": 10, "timed": 3}),
    ):
        detail = store.trials.detail(run_trial(store, campaign, layout, **changes))
        sent = vars_of(make_measurement(layout, **changes))
        assert detail.trial.state == "COMPLETED"
        assert detail.iterations == sent.pop("iterations")
        assert vars_of(detail.trial.measurement) == sent
        assert detail.environment == make_environment()
        assert detail.log_tail == "the last line\n"
        (attempt,) = detail.attempts
        assert (attempt.attempt, attempt.ending, attempt.worker_name) == (1, "reported", "w1")
        assert detail.trial in ranked_trials(store, campaign, "tokens_per_s")


def vars_of(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def test_trials_are_listed_by_number_and_state(store: Store, campaign: int, worker: str) -> None:
    run_trial(store, campaign)
    for tp in (2, 4, 8):
        store.trials.add(campaign, Layout(tp=tp))
    assert [t.number for t in store.trials.find(campaign)] == [1, 2, 3, 4]
    assert [t.number for t in store.trials.find(campaign, states=("COMPLETED", "RUNNING"))] == [1]
    assert store.trials.by_number(campaign, 3).layout.tp == 4
    none = dict.fromkeys(("RUNNING", "INFEASIBLE", "FAILED", "CANCELLED"), 0)
    assert store.campaigns.count_trials(campaign) == {"PENDING": 3, "COMPLETED": 1, **none}


def test_trials_end_in_an_order_of_their_own(store: Store, campaign: int, worker: str) -> None:
    ids = [store.trials.add(campaign, Layout(tp=tp)).id for tp in (1, 2, 4)]
    take_leases(store, worker, 3)
    post_outcome(store, ids[2], 1, failed("out_of_memory"))
    post_outcome(store, ids[0], 1, completed())
    told = store.trials.ended_since(campaign, 0)
    assert [(t.id, t.ended_seq) for t in told] == [(ids[2], 1), (ids[0], 2)]
    store.campaigns.cancel(campaign)
    post_outcome(store, ids[1], 1, failed("cancelled"))
    assert [t.id for t in store.trials.ended_since(campaign, 2)] == [ids[1]]


@pytest.mark.sqlite_is_enough(False)
def test_only_a_layout_that_was_tried_is_called_a_duplicate(store: Store, campaign: int) -> None:
    store.trials.add(campaign, Layout())
    with store._db.write() as session:
        # Damaged: the next number is taken.
        session.execute(update(Campaign).values(last_number=0))
    with pytest.raises(IntegrityError, match=r"trials\.number|uq_trials_campaign_id_number"):
        store.trials.add(campaign, Layout(tp=2))
    with store._db.write() as session:
        session.execute(update(Campaign).values(last_number=1))
    with pytest.raises(TrialDuplicateError):
        store.trials.add(campaign, Layout())


PLAIN = Layout()


def ended(store: Store, campaign: int, reason: str | None = None) -> TrialRecord:
    """A trial of the plain layout that has ended."""
    outcome = None if reason is None else failed(reason)
    return store.trials.get(run_trial(store, campaign, PLAIN, outcome))


def audit(store: Store) -> list[tuple[str, str, str, dict[str, Any]]]:
    query = select(AuditRow).where(AuditRow.target_kind == "trial").order_by(AuditRow.id)
    with store._db.read() as session:
        return [(r.actor, r.action, r.target, r.details) for r in session.scalars(query)]


def test_a_completed_trial_is_measured_again_not_queued_again(store: Store, campaign: int) -> None:
    trial = ended(store, campaign)
    with pytest.raises(TrialStateError, match=r"COMPLETED; only a FAILED, .* repeat it"):
        store.trials.requeue(trial.id)
    physics = store.by(Actor(name="physics", role="submitter"))
    added = physics.trials.measure_again(trial.id, times=3)
    assert [(t.number, t.repeat_index) for t in added] == [(2, 1), (3, 2), (4, 3)]
    assert {(t.layout, t.state, t.repeat_of) for t in added} == {(PLAIN, "PENDING", trial.id)}
    details = {"campaign": "first", "number": 1, "added": [2, 3, 4]}
    assert audit(store) == [("physics", "trial.repeat", str(trial.id), details)]
    store.trials.cancel(added[-1].id)
    query = select(EventRow.kind).where(EventRow.trial_id == added[-1].id).order_by(EventRow.id)
    with store._db.read() as session:
        assert list(session.scalars(query)) == ["trial.added", "trial.ended"]


@pytest.mark.parametrize("reason", ["crashed", "out_of_memory"])
def test_a_failed_trial_is_queued_again_once(store: Store, campaign: int, reason: str) -> None:
    trial = ended(store, campaign, reason)
    with pytest.raises(TrialStateError, match="only a COMPLETED one is measured again: requeue it"):
        store.trials.measure_again(trial.id)
    again = store.trials.requeue(trial.id)
    assert (again.number, again.state, again.repeat_of) == (2, "PENDING", trial.id)
    assert store.trials.get(trial.id).state == trial.state, "the first keeps its end"
    with pytest.raises(TrialStateError, match="trial number 2 is of the same layout, and PENDING"):
        store.trials.requeue(trial.id)
    assert [entry[1] for entry in audit(store)] == ["trial.requeue"]
    store.trials.cancel(again.id)
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


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_running_trial_is_cancelled_by_its_worker(
    store: Store, worker: str, running: int, is_lost: bool
) -> None:
    assert store.trials.cancel(running).state == "RUNNING"
    assert store.trials.cancel(running).state == "RUNNING", "twice is once"
    beat = BeatBody(trial_id=running, attempt=1, iterations_done=1)
    assert send_beats(store, worker, [beat]).stop == (running,)
    if is_lost:
        store.workers.drain(worker)
    else:
        post_outcome(store, running, 1, failed("cancelled"))
    assert store.trials.get(running).state == "CANCELLED"
    assert store.trials.cancel(running).state == "CANCELLED", "once more is no error"
    assert [entry[1] for entry in audit(store)] == ["trial.cancel"]


def test_an_open_trial_is_not_repeated(store: Store, campaign: int, running: int) -> None:
    waiting = store.trials.add(campaign, Layout(tp=2)).id
    for trial, state in ((running, "RUNNING"), (waiting, "PENDING")):
        for wish in (store.trials.measure_again, store.trials.requeue, store.trials.repeat):
            with pytest.raises(TrialStateError, match=state):
                wish(trial)


def test_a_campaign_that_has_ended_takes_no_repeats(store: Store, campaign: int) -> None:
    good = ended(store, campaign)
    bad = run_trial(store, campaign, Layout(tp=2), failed())
    store.campaigns.cancel(campaign)
    with pytest.raises(CampaignStateError, match="takes no trials"):
        store.trials.measure_again(good.id, times=2)
    with pytest.raises(CampaignStateError, match="takes no trials"):
        store.trials.requeue(bad)
    assert len(store.trials.find(campaign)) == 2


def test_what_is_not_there_is_neither_read_nor_changed(store: Store, campaign: int) -> None:
    trials = store.trials
    for call in (trials.get, trials.detail, trials.repeat, trials.log, trials.cancel):
        with pytest.raises(TrialNotFoundError, match="there is no trial 7"):
            call(7)
    for wish in (trials.measure_again, trials.requeue):
        with pytest.raises(TrialNotFoundError, match="there is no trial 7"):
            wish(7)
    with pytest.raises(TrialNotFoundError, match="no trial number 5"):
        trials.by_number(campaign, 5)


@pytest.mark.sqlite_is_enough(False)
def test_repeats_asked_for_at_once_get_one_number_each(store: Store, campaign: int) -> None:
    trial = ended(store, campaign)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(store.trials.measure_again, [trial.id] * 12))
    repeats = store.trials.find(campaign)[1:]
    assert [t.number for t in repeats] == list(range(2, 14))
    assert sorted(t.repeat_index for t in repeats) == list(range(1, 13))


def test_a_trial_without_a_log_says_why(store: Store, campaign: int, worker: str) -> None:
    trial = store.trials.add(campaign, PLAIN)
    with pytest.raises(TrialLogNotFoundError, match="PENDING and has no log: it comes with"):
        store.trials.log(trial.id)
    post_outcome(store, trial.id, lease_one(store, worker).attempt, failed())
    assert store.trials.log(trial.id) == "Traceback ..."
    other = store.trials.add(campaign, Layout(tp=2))
    store.trials.cancel(other.id)
    with pytest.raises(TrialLogNotFoundError, match="CANCELLED and has no log: its ranks printed"):
        store.trials.log(other.id)

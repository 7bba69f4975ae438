"""Trials: what is kept of them and their outcomes, and what users wish of them."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError

from layout_tuner.protocol.worker_messages import BeatBody
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.allocations.leases import LEASE_S
from layout_tuner.results_db.errors import (
    AttemptNotFoundError,
    CampaignNotFoundError,
    CampaignStateError,
    MeasurementInvalidError,
    TrialDuplicateError,
    TrialLogNotFoundError,
    TrialNotFoundError,
    TrialStateError,
)
from layout_tuner.results_db.models.service_tables import AuditRow, EventRow
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.results_db.records import REPEAT_REASONS, TrialRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.store import (
    ODD,
    TurnableClock,
    completed,
    failed,
    lease_one,
    make_campaign,
    make_environment,
    make_iterations,
    make_measurement,
    make_worker,
    post_outcome,
    ranked_trials,
    run_trial,
    send_beats,
    take_leases,
)
from tests.tuner.factories import make_spec

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


def test_a_repeat_says_which_trial_it_repeats(store: Store, campaign: int) -> None:
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
        # A leaderboard states one peak, with which it computes MFU and HFU.
        at_one_peak = dict.fromkeys(("peak_tflops_per_device", "mfu", "hfu"))
        stored, *ranked = (
            dataclasses.replace(
                each, measurement=dataclasses.replace(each.measurement, **at_one_peak)
            )
            for each in (detail.trial, *ranked_trials(store, campaign, "tokens_per_s"))
        )
        assert stored in ranked


def vars_of(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}


def test_trials_are_listed_by_number_and_state(store: Store, campaign: int) -> None:
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
    wishes = (trials.repeat, trials.cancel, trials.measure_again, trials.requeue)
    for call in (trials.get, trials.detail, trials.log, *wishes):
        with pytest.raises(TrialNotFoundError, match="there is no trial 7"):
            call(7)
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


def lose_lease(store: Store, clock: TurnableClock) -> None:
    clock.forward(LEASE_S + 1)
    assert store.leases.expire()


def test_a_failure_ends_the_trial_and_keeps_its_reason(store: Store, campaign: int) -> None:
    for number, reason in enumerate(("out_of_memory", "crashed", "diverged", "unsupported"), 1):
        trial = run_trial(store, campaign, Layout(micro_batch_size=number), failed(reason))
        detail = store.trials.detail(trial)
        state = "INFEASIBLE" if reason == "out_of_memory" else "FAILED"
        assert (detail.trial.state, detail.trial.reason) == (state, reason)
        assert detail.trial.message == f"rank 1 of 2: {reason}"
        assert (detail.trial.node, detail.trial.measurement) == ("node-1", None)
        assert detail.log_tail == "Traceback ..."


@pytest.mark.sqlite_is_enough(False)
def test_an_outcome_posted_again_changes_nothing(store: Store, campaign: int, running: int) -> None:
    first = post_outcome(store, running, 1, completed(tokens_per_s=100.0))
    before = store.trials.detail(running)
    again = post_outcome(store, running, 1, completed(tokens_per_s=100.0))
    assert first == again
    assert again.accepted
    other = post_outcome(store, running, 1, completed(tokens_per_s=999.0, duration_s=99.0))
    assert (other.accepted, other.reason) == (
        False,
        "the attempt has reported another outcome, which stays",
    )
    assert store.trials.detail(running) == before
    assert store.campaigns.get(campaign).node_seconds == pytest.approx(15.36)


@pytest.mark.parametrize("first", ["node_lost", "cancelled", "crashed"])
def test_the_first_outcome_of_an_attempt_stands(store: Store, running: int, first: str) -> None:
    before = post_outcome(store, running, 1, failed(first))
    contradiction = post_outcome(store, running, 1, completed())
    assert (contradiction.accepted, contradiction.state) == (False, before.state)
    assert store.trials.get(running).measurement is None
    assert post_outcome(store, running, 1, failed(first)) == before


def test_a_result_belongs_to_its_attempt(
    store: Store, clock: TurnableClock, worker: str, running: int
) -> None:
    post_outcome(store, running, 1, failed("node_lost"))
    clock.forward(1)
    lease_one(store, worker)
    assert post_outcome(store, running, 2, completed()).accepted
    assert not post_outcome(store, running, 1, completed()).accepted
    assert post_outcome(store, running, 2, completed()).accepted


@pytest.mark.sqlite_is_enough(False)
def test_a_late_result_stops_the_next_attempt(
    store: Store, clock: TurnableClock, running: int
) -> None:
    lose_lease(store, clock)
    other = make_worker(store, "w2")
    assert lease_one(store, other.id).attempt == 2
    assert post_outcome(store, running, 1, completed(tokens_per_s=100.0)).accepted
    beat = BeatBody(trial_id=running, attempt=2, iterations_done=1)
    assert send_beats(store, other.id, [beat]).stop == (running,)
    too_late = post_outcome(store, running, 2, completed(tokens_per_s=999.0))
    assert (too_late.accepted, too_late.state) == (False, "COMPLETED")
    detail = store.trials.detail(running)
    assert detail.trial.measurement.tokens_per_s == 100.0
    assert detail.trial.lost_attempts == 0
    assert [a.ending for a in detail.attempts] == ["reported", "superseded"]
    assert post_outcome(store, running, 2, completed()) == too_late


def test_an_outcome_after_the_end_is_paid_for(
    store: Store, clock: TurnableClock, campaign: int, running: int
) -> None:
    lose_lease(store, clock)
    store.campaigns.cancel(campaign)
    receipt = post_outcome(store, running, 1, completed(duration_s=7))
    assert (receipt.accepted, receipt.state) == (False, "CANCELLED")
    assert store.trials.get(running).measurement is None
    assert store.campaigns.get(campaign).node_seconds == pytest.approx(7)


def test_three_lost_nodes_end_a_trial(
    store: Store, campaign: int, worker: str, running: int
) -> None:
    for attempt, (reason, lost) in enumerate((("cancelled", 0), ("node_lost", 1)), 1):
        receipt = post_outcome(store, running, attempt, failed(reason))
        assert (receipt.accepted, receipt.state) == (True, "PENDING")
        assert store.trials.get(running).lost_attempts == lost
        assert lease_one(store, worker).attempt == attempt + 1
    post_outcome(store, running, 3, failed("node_lost"))
    assert lease_one(store, worker).attempt == 4
    receipt = post_outcome(store, running, 4, failed("node_lost"))
    assert receipt.state == "FAILED"
    ended = store.trials.detail(running)
    assert (ended.trial.reason, ended.trial.node) == ("node_lost", "node-1")
    assert ended.log_tail == "Traceback ..."
    assert len(store.trials.ended_since(campaign, 0)) == 1


def test_a_superseded_attempt_stops_without_effect(
    store: Store, clock: TurnableClock, running: int
) -> None:
    lose_lease(store, clock)
    other = make_worker(store, "w2")
    lease_one(store, other.id)
    for reason in ("cancelled", "node_lost"):
        for _ in range(2):
            receipt = post_outcome(store, running, 1, failed(reason))
            assert (receipt.accepted, receipt.state) == (False, "RUNNING")
    trial = store.trials.get(running)
    assert (trial.worker_id, trial.attempt, trial.lost_attempts) == (other.id, 2, 1)


def test_a_measurement_before_the_stop_is_kept(store: Store, campaign: int, running: int) -> None:
    store.campaigns.cancel(campaign)
    assert post_outcome(store, running, 1, completed()).state == "COMPLETED"


def test_an_attempt_that_never_was_is_refused(store: Store, running: int) -> None:
    with pytest.raises(AttemptNotFoundError, match="no attempt 2; its latest is 1"):
        post_outcome(store, running, 2, completed())
    with pytest.raises(TrialNotFoundError, match="no trial 77"):
        post_outcome(store, 77, 1, completed())
    assert store.trials.get(running).state == "RUNNING"


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"peak_memory_bytes_by_stage": (5 << 30, 2)}, "peak memory of 2 stages; the layout has pp=1"),
    ({"peak_memory_bytes": 10**12}, "931.3 GiB is more than the device has, 4 GiB as it is"),
    ({"peak_memory_bytes": 1 << 20}, "1 MiB is less than a rank of the layout"),
    (
        {"tokens_per_step": 128_000, "tokens_per_s": 1e6},
        r"128000 tokens are not those of the layout, 128 \(dp",
    ),
    (
        {"tokens_per_s_per_device": 500.0},
        r"500\.0 is not tokens_per_s=1000\.0 over the 1 devices of the layout",
    ),
    ({"timed": 1}, "1 is not the number of timed iterations that the probe was asked for, 10"),
    ({"iterations": make_iterations(0.1, warmup=1)}, "1 iterations of warm-up are not 2 to"),
    ({"timed": 2, "shortened": True}, "2 of 10 iterations were timed; .* stopped before 3"),
    ({"duration_s": 1e6}, r"duration_s=1e\+06, and 1\.000 s have passed since the trial was"),
]
"""Changes of a measurement, and how it is refused then."""


@pytest.mark.sqlite_is_enough(False)
def test_a_measurement_that_cannot_be_is_refused_and_nothing_changes(database_url: str) -> None:
    clock = TurnableClock()
    with closing(Store(database_url, clock=clock)) as store:
        campaign = store.campaigns.create(make_spec().to_mapping(), num_legal_layouts=1).id
        trial_id = store.trials.add(campaign, Layout()).id
        lease_one(store, make_worker(store).id)
        clock.forward(1)
        for changes, message in IMPOSSIBLE:
            with pytest.raises(MeasurementInvalidError, match=message):
                post_outcome(store, trial_id, 1, completed(**changes))
            assert store.trials.get(trial_id).state == "RUNNING"
            assert store.campaigns.get(campaign).node_seconds == 0
        assert post_outcome(store, trial_id, 1, completed()).accepted
        assert store.campaigns.get(campaign).node_seconds == 1, "4 s are stated, and 1 s has passed"

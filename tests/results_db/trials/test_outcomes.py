import math
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from results_db.allocations.leases import LEASE_S
from results_db.errors import (
    AttemptNotFoundError,
    MeasurementInvalidError,
    TrialNotFoundError,
)
from results_db.store import Store
from search_spaces.errors import OutcomeInvalidError
from search_spaces.protocol.outcome import Iteration, IterationKind
from search_spaces.protocol.worker_messages import BeatBody
from search_spaces.spec.layout import Layout
from tests.kit.store import (
    TurnableClock,
    completed,
    failed,
    lease_one,
    make_campaign,
    make_iterations,
    make_worker,
)
from tests.tuner.factories import make_spec

SPEC = make_spec()


@pytest.fixture
def campaign(store: Store) -> int:
    return make_campaign(store)


@pytest.fixture
def worker_id(store: Store) -> str:
    return make_worker(store).id


@pytest.fixture
def trial_id(store: Store, campaign: int, worker_id: str) -> int:
    """A trial that runs, in its first attempt."""
    trial = store.trials.add(campaign, Layout())
    lease_one(store, worker_id)
    return trial.id


def lose_lease(store: Store, clock: TurnableClock) -> None:
    clock.forward(LEASE_S + 1)
    assert store.leases.expire()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("out_of_memory", "INFEASIBLE"),
        ("crashed", "FAILED"),
        ("timeout", "FAILED"),
        ("diverged", "FAILED"),
        ("unsupported", "FAILED"),
    ],
)
def test_a_failure_ends_the_trial_and_keeps_its_reason(
    store: Store, trial_id: int, reason: str, state: str
) -> None:
    assert store.outcomes.post(trial_id, 1, failed(reason)).accepted
    detail = store.trials.detail(trial_id)
    assert (detail.trial.state, detail.trial.reason) == (state, reason)
    assert detail.trial.message == f"rank 1 of 2: {reason}"
    assert detail.trial.node == "node-1"
    assert detail.trial.measurement is None
    assert detail.log_tail == "Traceback ..."


def test_posting_an_outcome_again_changes_nothing(
    store: Store, campaign: int, trial_id: int
) -> None:
    first = store.outcomes.post(trial_id, 1, completed(tokens_per_s=100.0))
    before = store.trials.detail(trial_id)
    again = store.outcomes.post(trial_id, 1, completed(tokens_per_s=100.0))
    assert first == again
    assert again.accepted
    other = store.outcomes.post(trial_id, 1, completed(tokens_per_s=999.0, duration_s=99.0))
    assert (other.accepted, other.reason) == (
        False,
        "the attempt has reported another outcome, which stays",
    )
    assert store.trials.detail(trial_id) == before
    assert store.campaigns.get(campaign).node_seconds == pytest.approx(15.36)


@pytest.mark.parametrize("first", ["node_lost", "cancelled", "crashed"])
def test_an_attempt_that_says_something_else_afterwards_is_not_told_that_it_was_taken(
    store: Store, worker_id: str, trial_id: int, first: str
) -> None:
    before = store.outcomes.post(trial_id, 1, failed(first))
    contradiction = store.outcomes.post(trial_id, 1, completed())
    assert (contradiction.accepted, contradiction.state) == (False, before.state)
    assert store.trials.get(trial_id).measurement is None
    assert store.outcomes.post(trial_id, 1, failed(first)) == before


def test_an_attempt_is_not_credited_with_the_measurement_of_another(
    store: Store, clock: TurnableClock, worker_id: str, trial_id: int
) -> None:
    store.outcomes.post(trial_id, 1, failed("node_lost"))
    clock.forward(1)
    lease_one(store, worker_id)
    assert store.outcomes.post(trial_id, 2, completed()).accepted
    assert not store.outcomes.post(trial_id, 1, completed()).accepted
    assert store.outcomes.post(trial_id, 2, completed()).accepted


def test_a_late_measurement_of_a_waiting_trial_is_taken(
    store: Store, clock: TurnableClock, worker_id: str, trial_id: int
) -> None:
    lose_lease(store, clock)
    receipt = store.outcomes.post(trial_id, 1, completed())
    assert (receipt.accepted, receipt.state) == (True, "COMPLETED")
    assert store.trials.get(trial_id).lost_attempts == 0
    assert store.leases.lease(worker_id, 1) == []


def test_a_late_measurement_stops_the_attempt_that_runs_now(
    store: Store, clock: TurnableClock, trial_id: int
) -> None:
    lose_lease(store, clock)
    other = make_worker(store, "w2")
    assert lease_one(store, other.id).attempt == 2
    assert store.outcomes.post(trial_id, 1, completed(tokens_per_s=100.0)).accepted
    beat = BeatBody(trial_id=trial_id, attempt=2, iterations_done=1)
    assert store.leases.heartbeat(other.id, [beat]).stop == (trial_id,)
    too_late = store.outcomes.post(trial_id, 2, completed(tokens_per_s=999.0))
    assert (too_late.accepted, too_late.state) == (False, "COMPLETED")
    detail = store.trials.detail(trial_id)
    assert detail.trial.measurement is not None
    assert detail.trial.measurement.tokens_per_s == 100.0
    assert [a.ending for a in detail.attempts] == ["reported", "superseded"]
    assert store.outcomes.post(trial_id, 2, completed()) == too_late


def test_what_a_late_attempt_really_cost_replaces_what_was_guessed(
    store: Store, clock: TurnableClock, campaign: int, trial_id: int
) -> None:
    lose_lease(store, clock)
    assert store.campaigns.get(campaign).node_seconds == pytest.approx(0)
    store.outcomes.post(trial_id, 1, completed(duration_s=30))
    assert store.trials.get(trial_id).node_seconds == pytest.approx(30)
    assert store.campaigns.get(campaign).node_seconds == pytest.approx(30)


def test_an_outcome_after_the_trial_has_ended_is_not_taken_but_paid_for(
    store: Store, clock: TurnableClock, campaign: int, trial_id: int
) -> None:
    lose_lease(store, clock)
    store.campaigns.cancel(campaign)
    receipt = store.outcomes.post(trial_id, 1, completed(duration_s=7))
    assert (receipt.accepted, receipt.state) == (False, "CANCELLED")
    assert store.trials.get(trial_id).measurement is None
    assert store.campaigns.get(campaign).node_seconds == pytest.approx(7)


def test_a_lost_node_costs_an_attempt_and_teaches_nothing(
    store: Store, campaign: int, worker_id: str, trial_id: int
) -> None:
    receipt = store.outcomes.post(trial_id, 1, failed("node_lost"))
    assert (receipt.accepted, receipt.state) == (True, "PENDING")
    assert store.trials.get(trial_id).lost_attempts == 1
    for attempt in (2, 3):
        assert lease_one(store, worker_id).attempt == attempt
        receipt = store.outcomes.post(trial_id, attempt, failed("node_lost"))
    assert receipt.state == "FAILED"
    ended = store.trials.detail(trial_id)
    assert (ended.trial.reason, ended.trial.node) == ("node_lost", "node-1")
    assert ended.log_tail == "Traceback ..."
    assert len(store.trials.ended_since(campaign, 0)) == 1


def test_a_worker_that_stops_a_trial_nobody_cancelled_puts_it_back(
    store: Store, worker_id: str, trial_id: int
) -> None:
    receipt = store.outcomes.post(trial_id, 1, failed("cancelled"))
    assert (receipt.accepted, receipt.state) == (True, "PENDING")
    assert store.trials.get(trial_id).lost_attempts == 0
    assert lease_one(store, worker_id).attempt == 2


def test_stopping_an_attempt_that_was_superseded_does_not_touch_the_trial(
    store: Store, clock: TurnableClock, trial_id: int
) -> None:
    lose_lease(store, clock)
    other = make_worker(store, "w2")
    lease_one(store, other.id)
    for reason in ("cancelled", "node_lost"):
        for _ in range(2):
            receipt = store.outcomes.post(trial_id, 1, failed(reason))
            assert (receipt.accepted, receipt.state) == (False, "RUNNING")
    running = store.trials.get(trial_id)
    assert (running.worker_id, running.attempt, running.lost_attempts) == (other.id, 2, 1)


def test_a_cancelled_campaign_ends_its_running_trial_when_the_worker_has_stopped(
    store: Store, campaign: int, trial_id: int
) -> None:
    store.campaigns.cancel(campaign)
    assert store.outcomes.post(trial_id, 1, failed("cancelled")).state == "CANCELLED"
    assert store.trials.count_open(campaign) == 0


def test_a_measurement_that_came_before_the_stop_is_kept(
    store: Store, campaign: int, trial_id: int
) -> None:
    store.campaigns.cancel(campaign)
    assert store.outcomes.post(trial_id, 1, completed()).state == "COMPLETED"


def test_an_attempt_that_never_was_is_refused(store: Store, trial_id: int) -> None:
    with pytest.raises(AttemptNotFoundError, match="no attempt 2; its latest is 1"):
        store.outcomes.post(trial_id, 2, completed())
    with pytest.raises(TrialNotFoundError, match="no trial 77"):
        store.outcomes.post(77, 1, completed())
    assert store.trials.get(trial_id).state == "RUNNING"


def iteration(index: int = 0, kind: IterationKind = "timed", loss: float = 1.0) -> Iteration:
    return Iteration(index=index, kind=kind, step_time_s=1.0, loss=loss, grad_norm=1.0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"peak_memory_bytes_by_stage": (5 << 30, 2)},
            "peak memory of 2 stages; the layout has pp=1",
        ),
        ({"peak_memory_bytes": 10**12}, "1000000000000 bytes are more than the device has"),
        ({"peak_memory_bytes": 1 << 20}, "1048576 bytes are fewer than a rank of the layout"),
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
        (
            {"timed": 2, "shortened": True},
            "2 of 10 iterations were timed; .* stopped before 3",
        ),
        ({"duration_s": 1e6}, r"duration_s=1e\+06, and 1\.000 s have passed since the trial was"),
    ],
)
def test_a_measurement_that_cannot_be_is_refused_and_nothing_changes(
    database_url: str, changes: dict[str, Any], message: str
) -> None:
    clock = TurnableClock()
    with closing(Store(database_url, clock=clock)) as store:
        campaign = store.campaigns.create(SPEC.to_mapping(), num_legal_layouts=1).id
        trial_id = store.trials.add(campaign, Layout()).id
        lease_one(store, make_worker(store).id)
        clock.forward(1)
        with pytest.raises(MeasurementInvalidError, match=message):
            store.outcomes.post(trial_id, 1, completed(**changes))
        assert store.trials.get(trial_id).state == "RUNNING"
        assert store.campaigns.get(campaign).node_seconds == 0
        assert store.outcomes.post(trial_id, 1, completed()).accepted
        assert store.campaigns.get(campaign).node_seconds == 1, "4 s are stated, and 1 s has passed"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens_per_s_per_device": math.nan}, "tokens_per_s_per_device"),
        ({"mfu": math.inf}, "mfu"),
        ({"model_tflops_per_device": -5.0}, "model_tflops_per_device"),
        ({"step_time_s": 0.0}, "step_time_s"),
        ({"tokens_per_step": 1 << 70}, "tokens_per_step"),
        ({"peak_memory_bytes_by_stage": (1 << 70,)}, "peak_memory_bytes_by_stage.0"),
        ({"duration_s": math.nan}, "duration_s"),
        ({"duration_s": -1.0}, "duration_s"),
        ({"duration_s": 1e308}, "duration_s"),
        ({"iterations": (iteration(loss=math.nan),)}, "iterations.0.loss"),
        ({"iterations": ()}, "iterations"),
        ({"iterations": (iteration(kind="warmup"),)}, "iterations"),
    ],
)
def test_figures_that_no_database_could_rank_never_come_as_far_as_the_store(
    changes: dict[str, Any], field: str
) -> None:
    plain = completed()
    assert plain.measurement is not None
    with pytest.raises(OutcomeInvalidError) as refused:
        replace(plain if "duration_s" in changes else plain.measurement, **changes)
    assert refused.value.field == field

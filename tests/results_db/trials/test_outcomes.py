from contextlib import closing
from typing import Any

import pytest

from results_db.allocations.leases import LEASE_S
from results_db.errors import (
    AttemptNotFoundError,
    MeasurementInvalidError,
    TrialNotFoundError,
)
from results_db.store import Store
from search_spaces.protocol.worker_messages import BeatBody
from search_spaces.spec.layout import Layout
from tests.kit.store import (
    TurnableClock,
    completed,
    failed,
    lease_one,
    make_iterations,
    make_worker,
    post_outcome,
    run_trial,
    send_beats,
    take_leases,
)
from tests.tuner.factories import make_spec

pytestmark = pytest.mark.sqlite_is_enough


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
def test_the_first_outcome_of_an_attempt_stands(
    store: Store, worker: str, running: int, first: str
) -> None:
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


def test_a_late_measurement_is_taken_and_paid_for(
    store: Store, clock: TurnableClock, campaign: int, worker: str, running: int
) -> None:
    lose_lease(store, clock)
    assert store.campaigns.get(campaign).node_seconds == pytest.approx(0)
    receipt = post_outcome(store, running, 1, completed(duration_s=30))
    assert (receipt.accepted, receipt.state) == (True, "COMPLETED")
    trial = store.trials.get(running)
    assert (trial.lost_attempts, trial.node_seconds) == (0, pytest.approx(30))
    assert store.campaigns.get(campaign).node_seconds == pytest.approx(30)
    assert take_leases(store, worker, 1) == []


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
    assert detail.trial.measurement is not None
    assert detail.trial.measurement.tokens_per_s == 100.0
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

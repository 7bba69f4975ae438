"""The history of a campaign: the best so far, failures, and the timeline of attempts."""

from __future__ import annotations

import pytest
from sqlalchemy import update

from results_db.allocations.leases import LEASE_S
from results_db.errors import CampaignNotFoundError
from results_db.models.tables import Campaign
from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.store import (
    START,
    TurnableClock,
    completed,
    failed,
    lease_one,
    make_campaign,
    make_worker,
    post_outcome,
    run_trial,
)

pytestmark = pytest.mark.sqlite_is_enough

OUTCOMES = (
    failed("crashed"),
    completed(tokens_per_s=200.0),
    completed(tokens_per_s=900.0, shortened=True, iterations_asked=9),
    completed(tokens_per_s=150.0),
    completed(tokens_per_s=300.0),
    failed("out_of_memory"),
    completed(tokens_per_s=800.0, oversubscribed=True),
    completed(tokens_per_s=300.0),
    completed(tokens_per_s=310.0, peak_memory_bytes=7 << 30),
)
"""In the order of the ends; the best so far rises at the second and at the fifth, and without a
limit of memory at the last."""


@pytest.fixture
def campaign(store: Store) -> int:
    campaign = make_campaign(store)
    for number, outcome in enumerate(OUTCOMES, 1):
        run_trial(store, campaign, Layout(num_microbatches=number), outcome)
    return campaign


def test_the_best_rises_only_with_trials_that_count(store: Store, campaign: int) -> None:
    history = store.history.best_so_far(campaign)
    assert [point.value for point in history.points] == [
        None if outcome.measurement is None else outcome.measurement.tokens_per_s
        for outcome in OUTCOMES
    ]
    best = [None, 200.0, 200.0, 200.0, 300.0, 300.0, 300.0, 300.0, 310.0]
    assert [point.best for point in history.points] == best
    assert [point.number for point in history.points if point.is_improvement] == [2, 5, 9]
    assert [point.ended_seq for point in history.points] == list(range(1, 10))
    first, second, *_ = history.points
    assert (first.state, first.reason) == ("FAILED", "crashed")
    assert (second.state, second.reason) == ("COMPLETED", None)
    assert (history.num_ended, history.num_left_out) == (9, 0)
    with store._db.write() as session:
        session.execute(update(Campaign).values(max_peak_memory_bytes=6 << 30))
    history = store.history.best_so_far(campaign)
    assert [point.number for point in history.points if point.is_improvement] == [2, 5]
    nothing = store.history.best_so_far(make_campaign(store, "empty"))
    assert (nothing.points, nothing.num_ended) == ([], 0)
    with pytest.raises(CampaignNotFoundError):
        store.history.best_so_far(10**6)


def test_a_history_is_thinned_and_keeps_every_new_best(store: Store, campaign: int) -> None:
    whole = store.history.best_so_far(campaign).points
    for limit in (1, 2, 3, 4, 6, 8, 9):
        history = store.history.best_so_far(campaign, limit=limit)
        assert len(history.points) <= limit
        assert history.num_left_out == 9 - len(history.points)
        assert [point for point in whole if point in history.points] == list(history.points)
        risen = [point for point in history.points if point.is_improvement]
        assert len(risen) == min(limit, 3)
        assert risen[-1].number == 9


@pytest.mark.sqlite_is_enough(False)
def test_failures_are_counted_by_reason_and_node_most_first(store: Store, campaign: int) -> None:
    for number, reason in ((11, "crashed"), (12, "crashed"), (13, "cancelled")):
        run_trial(store, campaign, Layout(num_microbatches=number), failed(reason))
    assert store.history.failures(campaign) == [
        ("FAILED", "crashed", "node-1", 3, 11),
        ("INFEASIBLE", "out_of_memory", "node-1", 1, 6),
    ]
    assert store.history.failures(campaign)[0].num_trials == 3
    assert store.history.failures(10**6) == []


@pytest.mark.sqlite_is_enough(False)
def test_a_timeline_has_every_attempt_the_newest_first(store: Store, clock: TurnableClock) -> None:
    campaign = make_campaign(store)
    other = make_campaign(store, "other")
    worker = make_worker(store)
    for number in (1, 2, 3):
        store.trials.add(campaign, Layout(num_microbatches=number))
    first = lease_one(store, worker.id)
    clock.forward(1)
    post_outcome(store, first.trial_id, first.attempt, failed("crashed", duration_s=1.0))
    lease_one(store, worker.id)
    clock.forward(LEASE_S + 1)
    store.leases.expire()
    again = lease_one(store, worker.id)
    clock.forward(1)
    lease_one(store, worker.id)
    timeline = store.history.timeline(campaign)
    found = [(each.number, each.attempt, each.ending, each.state) for each in timeline.attempts]
    assert found == [
        (3, 1, None, "RUNNING"),
        (2, 2, None, "RUNNING"),
        (2, 1, "lost", "RUNNING"),
        (1, 1, "reported", "FAILED"),
    ]
    newest, *_, oldest = timeline.attempts
    assert (newest.worker_id, newest.worker_name) == (worker.id, "w1")
    assert (newest.num_nodes, newest.ended_at) == (1, None)
    assert oldest.started_at == START
    assert oldest.ended_at is not None
    assert (oldest.reason, newest.reason) == ("crashed", None)
    assert again.attempt == 2
    assert (timeline.num_attempts, timeline.num_left_out) == (4, 0)
    some = store.history.timeline(campaign, limit=2)
    assert some.attempts == timeline.attempts[:2]
    assert some.num_left_out == 2
    assert store.history.timeline(other).attempts == []
    assert store.history.timeline(other).num_attempts == 0

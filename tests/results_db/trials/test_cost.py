import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from results_db.allocations.leases import LEASE_S
from results_db.records import Cost
from results_db.store import Store
from search_spaces.protocol.worker_messages import BeatBody, StatusBody
from search_spaces.spec.layout import Layout
from tests.kit.store import (
    TurnableClock,
    completed,
    failed,
    lease_one,
    make_campaign,
    make_worker,
)

pytestmark = pytest.mark.sqlite_is_enough

amounts = st.floats(0, 1e6, allow_nan=False)


@given(held_s=amounts, nodes=amounts, used_nodes=amounts, iterations_s=amounts)
def test_a_probe_s_parts_sum_to_what_it_held_and_none_is_negative(
    held_s: float, nodes: float, used_nodes: float, iterations_s: float
) -> None:
    cost = Cost.of_probe(
        held_s=held_s, nodes=nodes, used_nodes=used_nodes, iterations_s=iterations_s
    )
    assert min(cost.iterations, cost.start, cost.idle) >= 0
    assert cost.lost == 0
    assert cost.total == pytest.approx(held_s * nodes)


def beat(trial_id: int, attempt: int = 1, **said: object) -> BeatBody:
    return BeatBody(trial_id=trial_id, attempt=attempt, iterations_done=1, **said)  # type: ignore[arg-type]


def test_a_probe_on_half_a_node_costs_half_a_node(store: Store, clock: TurnableClock) -> None:
    campaign, worker = make_campaign(store), make_worker(store)
    layout = Layout(dp=4)
    trial = store.trials.add(campaign, layout)
    lease_one(store, worker.id)
    clock.forward(10)
    outcome = completed(layout, duration_s=10, tokens_per_s=1e4)
    store.outcomes.post(trial.id, 1, outcome, nodes_held=0.5, iterations_s=6)
    expected = Cost(iterations=3, start=2, idle=0, lost=0)
    assert store.trials.get(trial.id).cost == store.campaigns.get(campaign).cost == expected
    assert store.campaigns.get(campaign).node_seconds == 5


def test_devices_of_its_nodes_that_a_layout_does_not_use_are_idle(
    store: Store, clock: TurnableClock
) -> None:
    campaign, worker = make_campaign(store), make_worker(store, num_nodes=2)
    layout = Layout(num_nodes=2, dp=12)
    trial = store.trials.add(campaign, layout)
    lease_one(store, worker.id)
    clock.forward(10)
    store.outcomes.post(
        trial.id, 1, completed(layout, duration_s=10, tokens_per_s=1e4), iterations_s=6
    )
    # 12 of 16 devices: a node and a half.
    assert store.trials.get(trial.id).cost == Cost(iterations=9, start=6, idle=5, lost=0)


def test_without_a_word_on_iterations_those_of_the_measurement_count(
    store: Store, clock: TurnableClock
) -> None:
    campaign, worker = make_campaign(store), make_worker(store, devices_per_node=1)
    trial = store.trials.add(campaign, Layout())
    lease_one(store, worker.id)
    clock.forward(10)
    store.outcomes.post(trial.id, 1, completed(duration_s=4, tokens_per_s=1024))
    # Twelve steps of an eighth of a second.
    assert store.trials.get(trial.id).cost == Cost(iterations=1.5, start=2.5)


def test_a_failed_probe_s_time_is_its_start_where_nobody_counted_iterations(
    store: Store, clock: TurnableClock
) -> None:
    campaign, worker = make_campaign(store), make_worker(store, devices_per_node=1)
    trial = store.trials.add(campaign, Layout())
    lease_one(store, worker.id)
    clock.forward(10)
    store.outcomes.post(trial.id, 1, failed("crashed", duration_s=4))
    assert store.trials.get(trial.id).cost == Cost(start=4)


def test_a_lease_that_merely_waited_costs_nothing_when_it_is_lost(
    store: Store, clock: TurnableClock
) -> None:
    campaign, worker = make_campaign(store), make_worker(store)
    trial = store.trials.add(campaign, Layout())
    lease_one(store, worker.id)
    clock.forward(10)
    store.leases.heartbeat(worker.id, [beat(trial.id, phase="waiting", held_s=0.0)])
    clock.forward(LEASE_S + 1)
    store.leases.expire()
    assert store.trials.get(trial.id).lost_attempts == 0
    assert store.campaigns.get(campaign).cost == Cost()


def test_a_lost_attempt_costs_what_its_worker_said_that_it_held(
    store: Store, clock: TurnableClock
) -> None:
    campaign, worker = make_campaign(store), make_worker(store)
    trial = store.trials.add(campaign, Layout(dp=4))
    lease_one(store, worker.id)
    clock.forward(10)
    for held_s in (7.0, 6.0):  # an earlier beat that comes late takes nothing back
        store.leases.heartbeat(worker.id, [beat(trial.id, held_s=held_s, nodes_held=0.5)])
    clock.forward(LEASE_S + 1)
    store.leases.expire()
    assert store.campaigns.get(campaign).cost == Cost(lost=3.5)
    (attempt,) = store.trials.detail(trial.id).attempts
    assert (attempt.cost, attempt.held_s, attempt.nodes_held) == (Cost(lost=3.5), 7.0, 0.5)


def test_an_attempt_that_waits_for_a_second_run_is_charged_for_the_first(
    store: Store, clock: TurnableClock
) -> None:
    campaign, worker = make_campaign(store), make_worker(store)
    trial = store.trials.add(campaign, Layout(dp=4))
    lease_one(store, worker.id)
    clock.forward(10)
    store.leases.heartbeat(worker.id, [beat(trial.id, held_s=8.0, nodes_held=0.5)])
    store.leases.heartbeat(worker.id, [beat(trial.id, phase="waiting", held_s=9.0, nodes_held=0.0)])
    clock.forward(LEASE_S + 1)
    store.leases.expire()
    assert store.campaigns.get(campaign).cost == Cost(lost=4.5)


def test_a_late_outcome_turns_what_was_lost_into_what_it_was_spent_on(
    store: Store, clock: TurnableClock
) -> None:
    campaign, worker = make_campaign(store), make_worker(store, devices_per_node=2)
    layout = Layout(dp=2)
    trial = store.trials.add(campaign, layout)
    lease_one(store, worker.id)
    clock.forward(10)
    store.leases.heartbeat(worker.id, [beat(trial.id, held_s=5.0, nodes_held=1.0)])
    clock.forward(LEASE_S + 1)
    store.leases.expire()
    assert store.campaigns.get(campaign).cost == Cost(lost=5)
    store.outcomes.post(trial.id, 1, completed(layout, duration_s=8), iterations_s=6)
    assert store.campaigns.get(campaign).cost == Cost(iterations=6, start=2)


def test_an_attempt_that_its_worker_gives_back_is_lost_time(
    store: Store, clock: TurnableClock
) -> None:
    campaign, worker = make_campaign(store), make_worker(store)
    trial = store.trials.add(campaign, Layout(dp=8))
    lease_one(store, worker.id)
    clock.forward(10)
    store.outcomes.post(trial.id, 1, failed("cancelled", duration_s=3))
    assert store.trials.get(trial.id).state == "PENDING"
    assert store.campaigns.get(campaign).cost == Cost(lost=3)


def idle(store: Store, clock: TurnableClock, worker_id: str, node_s: float) -> None:
    clock.forward(20)
    store.leases.heartbeat(worker_id, [], status=StatusBody(idle_node_s=node_s))
    store.allocations.share_idle_time()


def test_an_allocation_s_idle_time_is_shared_among_the_running_campaigns_of_its_cluster(
    store: Store, clock: TurnableClock
) -> None:
    first, second = make_campaign(store), make_campaign(store, "second")
    elsewhere = make_campaign(store, "elsewhere", cluster="frontier")
    worker = make_worker(store)
    idle(store, clock, worker.id, 10)
    store.campaigns.pause(second)
    for _ in range(3):
        idle(store, clock, worker.id, 14)
    costs = [store.campaigns.get(campaign).cost.idle for campaign in (first, second, elsewhere)]
    assert costs == [9, 5, 0]
    assert store.campaigns.get(first).node_seconds == 0, "a budget counts what probes held"
    assert store.allocations.get(worker.id).cost == Cost(idle=14)


def test_idle_time_that_was_told_counts_once_whatever_is_lost_repeated_or_started_anew(
    store: Store, clock: TurnableClock
) -> None:
    campaign = make_campaign(store)
    worker = make_worker(store)
    for told in (2, 5, 5, 3, 9):  # 3: a beat that comes late; those between 5 and 9 were lost
        idle(store, clock, worker.id, told)
    assert store.campaigns.get(campaign).cost.idle == 9
    again = make_worker(store)  # the name's next session begins at 0
    idle(store, clock, again.id, 4)
    assert store.campaigns.get(campaign).cost.idle == 13


def test_idle_time_while_no_campaign_runs_is_nobody_s(store: Store, clock: TurnableClock) -> None:
    worker = make_worker(store)
    clock.forward(100)
    idle(store, clock, worker.id, 100)
    campaign = make_campaign(store)
    idle(store, clock, worker.id, 101)
    assert store.campaigns.get(campaign).cost.idle == 1
    assert store.allocations.get(worker.id).cost.idle == 101


@pytest.mark.sqlite_is_enough(False)
def test_the_parts_of_the_metrics_sum_to_those_of_all_campaigns_and_of_all_allocations(
    store: Store, clock: TurnableClock
) -> None:
    ended, running = make_campaign(store, "ended"), make_campaign(store, "running")
    first, second = make_worker(store, "w1"), make_worker(store, "w2")
    for campaign, worker, layout in ((ended, first, Layout(dp=2)), (running, second, Layout(dp=4))):
        trial = store.trials.add(campaign, layout)
        lease_one(store, worker.id)
        clock.forward(10)
        outcome = completed(layout, duration_s=10.0, tokens_per_s=1e4)
        store.outcomes.post(trial.id, 1, outcome, nodes_held=1.0, iterations_s=6.0)
    idle(store, clock, first.id, 30)
    store.campaigns.cancel(ended)
    idle(store, clock, second.id, 50)
    lost = store.trials.add(running, Layout(tp=2))
    lease_one(store, first.id)
    clock.forward(10)
    store.leases.heartbeat(first.id, [beat(lost.id, held_s=5.0, nodes_held=1.0)])
    clock.forward(LEASE_S + 1)
    store.leases.expire()
    told = Cost(**store.statistics.service_stats().node_seconds)
    assert told.idle > 80, "what allocations held for no probe is part of it"
    assert min(told.iterations, told.start, told.lost) > 0
    of_campaigns = sum((store.campaigns.get(each).cost for each in (ended, running)), start=Cost())
    of_allocations = sum(
        (store.allocations.get(each.id).cost for each in (first, second)), start=Cost()
    )
    assert dataclasses.astuple(told) == pytest.approx(dataclasses.astuple(of_campaigns))
    assert dataclasses.astuple(told) == pytest.approx(dataclasses.astuple(of_allocations))

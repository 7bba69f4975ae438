import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_tuner.protocol.worker_messages import BeatBody, StatusBody
from layout_tuner.results_db.allocations.leases import LEASE_S
from layout_tuner.results_db.records import Cost
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.store import (
    TurnableClock,
    completed,
    failed,
    lease_one,
    make_campaign,
    make_worker,
    post_outcome,
    send_beats,
)

pytestmark = pytest.mark.sqlite_is_enough

amounts = st.floats(0, 1e6, allow_nan=False)


@given(held_s=amounts, nodes=amounts, used_nodes=amounts, iterations_s=amounts)
def test_the_parts_of_a_cost_sum_up(
    held_s: float, nodes: float, used_nodes: float, iterations_s: float
) -> None:
    cost = Cost.of_probe(
        held_s=held_s, nodes=nodes, used_nodes=used_nodes, iterations_s=iterations_s
    )
    assert min(cost.iterations, cost.start, cost.idle) >= 0
    assert cost.lost == 0
    assert cost.total == pytest.approx(held_s * nodes)


@pytest.mark.parametrize(
    ("layout", "machine", "outcome", "said", "cost"),
    [
        pytest.param(
            *(Layout(dp=4), {}, {}, {"nodes_held": 0.5, "iterations_s": 6}),
            Cost(iterations=3, start=2),
            id="on half a node",
        ),
        pytest.param(
            *(Layout(num_nodes=2, dp=12), {"num_nodes": 2}, {}, {"iterations_s": 6}),
            Cost(iterations=9, start=6, idle=5),
            id="12 of 16 devices, a node and a half",
        ),
        pytest.param(
            *(Layout(), {"devices_per_node": 1}, {"duration_s": 4, "tokens_per_s": 1024}, {}),
            Cost(iterations=1.5, start=2.5),
            id="iterations of the measurement, twelve of 1/8 s",
        ),
        pytest.param(
            *(Layout(), {"devices_per_node": 1}, "crashed", {}),
            Cost(start=4),
            id="no iterations were counted",
        ),
        pytest.param(*(Layout(dp=8), {}, "cancelled", {}), Cost(lost=4), id="given back"),
    ],
)
def test_a_probe_costs_what_it_held(
    store: Store,
    clock: TurnableClock,
    campaign: int,
    layout: Layout,
    machine: dict[str, Any],
    outcome: dict[str, Any] | str,
    said: dict[str, Any],
    cost: Cost,
) -> None:
    trial = store.trials.add(campaign, layout)
    lease_one(store, make_worker(store, **machine).id)
    clock.forward(10)
    told = (
        failed(outcome)
        if isinstance(outcome, str)
        else completed(layout, **{"duration_s": 10, "tokens_per_s": 1e4, **outcome})
    )
    post_outcome(store, trial.id, 1, told, **said)
    assert store.trials.get(trial.id).cost == store.campaigns.get(campaign).cost == cost
    assert store.campaigns.get(campaign).node_seconds == cost.total


def beat(trial_id: int, **said: Any) -> BeatBody:
    return BeatBody(trial_id=trial_id, attempt=1, iterations_done=1, **said)


@pytest.mark.parametrize(
    ("beats", "cost"),
    [
        ([{}], Cost(lost=20)),
        ([{"phase": "waiting", "held_s": 0.0}], Cost()),
        ([{"held_s": 7.0, "nodes_held": 0.5}, {"held_s": 6.0, "nodes_held": 0.5}], Cost(lost=3.5)),
        (
            [
                {"held_s": 8.0, "nodes_held": 0.5},
                {"phase": "waiting", "held_s": 9.0, "nodes_held": 0.0},
            ],
            Cost(lost=4.5),
        ),
    ],
    ids=[
        *("heard of for 10 s, on two nodes", "it merely waited"),
        *("a beat that comes late takes nothing back", "it waited for a second run"),
    ],
)
def test_a_lost_attempt_costs_what_its_worker_said_that_it_held(
    store: Store, clock: TurnableClock, campaign: int, beats: list[dict[str, Any]], cost: Cost
) -> None:
    worker, layout = make_worker(store, num_nodes=2).id, Layout(num_nodes=2, dp=2)
    running = store.trials.add(campaign, layout).id
    lease_one(store, worker)
    clock.forward(10)
    for said in beats:
        send_beats(store, worker, [beat(running, **said)])
    clock.forward(LEASE_S + 1)
    store.leases.expire()
    assert store.campaigns.get(campaign).cost == cost
    (attempt,) = store.trials.detail(running).attempts
    assert attempt.cost == cost
    is_lost = beats[-1].get("phase") != "waiting"
    assert store.trials.get(running).lost_attempts == is_lost
    # What the next attempt costs is added.
    assert lease_one(store, worker).attempt == 2
    clock.forward(10)
    post_outcome(store, running, 2, completed(layout, duration_s=4))
    assert store.trials.get(running).node_seconds == pytest.approx(cost.total + 8)
    assert store.campaigns.get(campaign).node_seconds == pytest.approx(cost.total + 8)


def test_a_late_outcome_corrects_the_cost(
    store: Store, clock: TurnableClock, campaign: int, worker: str, running: int
) -> None:
    clock.forward(10)
    send_beats(store, worker, [beat(running, held_s=5.0, nodes_held=1.0)])
    clock.forward(LEASE_S + 1)
    store.leases.expire()
    assert store.campaigns.get(campaign).cost == Cost(lost=5)
    told = completed(duration_s=8, tokens_per_s=1e4)
    post_outcome(store, running, 1, told, iterations_s=6, nodes_held=0.125)
    assert store.campaigns.get(campaign).cost == Cost(iterations=0.75, start=0.25)


def idle(store: Store, clock: TurnableClock, worker_id: str, node_s: float) -> None:
    clock.forward(20)
    send_beats(store, worker_id, [], status=StatusBody(idle_node_s=node_s))
    store.allocations.share_idle_time()


def test_idle_time_is_shared_among_campaigns_that_run_there(
    store: Store, clock: TurnableClock
) -> None:
    worker = make_worker(store)
    clock.forward(100)
    idle(store, clock, worker.id, 100)  # no campaign runs: nobody's
    first, second = make_campaign(store), make_campaign(store, "second")
    elsewhere = make_campaign(store, "elsewhere", cluster="frontier")
    idle(store, clock, worker.id, 110)
    store.campaigns.pause(second)
    for _ in range(3):
        idle(store, clock, worker.id, 114)
    costs = [store.campaigns.get(campaign).cost.idle for campaign in (first, second, elsewhere)]
    assert costs == [9, 5, 0]
    assert store.campaigns.get(first).node_seconds == 0, "a budget counts what probes held"
    assert store.allocations.get(worker.id).cost == Cost(idle=114)


def test_nodes_are_not_idle_while_the_first_probe_holds_them(
    store: Store, clock: TurnableClock, campaign: int
) -> None:
    worker = make_worker(store, num_nodes=2)
    assert store.allocations.get(worker.id).idle_share is None
    trial = store.trials.add(campaign, Layout())
    lease_one(store, worker.id)
    clock.forward(100)
    iterating = BeatBody(trial_id=trial.id, attempt=1, iterations_done=3, held_s=90.0)
    send_beats(store, worker.id, [iterating], status=StatusBody(idle_node_s=110.0))
    assert store.allocations.get(worker.id).idle_share == 0.55


def test_idle_time_counts_once(
    store: Store, clock: TurnableClock, campaign: int, worker: str
) -> None:
    for told in (2, 5, 5, 3, 9):  # 3: a beat that comes late; those between 5 and 9 were lost
        idle(store, clock, worker, told)
    assert store.campaigns.get(campaign).cost.idle == 9
    again = make_worker(store)  # the name's next session begins at 0
    idle(store, clock, again.id, 4)
    assert store.campaigns.get(campaign).cost.idle == 13


@pytest.mark.sqlite_is_enough(False)
def test_metrics_are_sums_of_campaigns_and_of_allocations(
    store: Store, clock: TurnableClock
) -> None:
    ended, running = make_campaign(store, "ended"), make_campaign(store, "running")
    first, second = make_worker(store, "w1"), make_worker(store, "w2")
    for campaign, worker, layout in ((ended, first, Layout(dp=2)), (running, second, Layout(dp=4))):
        trial = store.trials.add(campaign, layout)
        lease_one(store, worker.id)
        clock.forward(10)
        outcome = completed(layout, duration_s=10.0, tokens_per_s=1e4)
        post_outcome(store, trial.id, 1, outcome, nodes_held=1.0, iterations_s=6.0)
    idle(store, clock, first.id, 30)
    store.campaigns.cancel(ended)
    idle(store, clock, second.id, 50)
    lost = store.trials.add(running, Layout(tp=2))
    lease_one(store, first.id)
    clock.forward(10)
    send_beats(store, first.id, [beat(lost.id, held_s=5.0, nodes_held=1.0)])
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

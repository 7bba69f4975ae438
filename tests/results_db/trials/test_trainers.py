"""Trainers in the database, the simulator among them: who runs what, and what is learnt from it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.errors import CampaignInvalidError
from layout_tuner.protocol.measurement import Iteration
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.protocol.worker_messages import BeatBody, StatusBody
from layout_tuner.results_db.campaigns.plans import PlanOptions
from layout_tuner.results_db.errors import MeasurementInvalidError
from layout_tuner.results_db.leaderboard.measured_runs import earlier_repeats
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.simulator import SIMULATED_LAUNCHER, SIMULATOR_VERSION, simulator_trainer
from tests.kit.store import (
    TurnableClock,
    completed,
    lease_one,
    make_campaign,
    make_iterations,
    make_spec,
    make_worker,
    post_outcome,
    ranked_trials,
    run_trial,
    send_beats,
    take_leases,
)

pytestmark = pytest.mark.sqlite_is_enough

TP1, TP2, TP4 = Layout(), Layout(tp=2), Layout(tp=4)
OBJECTIVE = "tokens_per_s_per_device"


def campaign_of(store: Store, trainer: str, name: str = "theirs", **changes: Any) -> int:
    spec = make_spec(name, probe={"trainer": trainer, "parameters": {}}) | changes
    return store.campaigns.create(spec, num_legal_layouts=100).id


def worker_with(store: Store, name: str = "w1", **trainers: str) -> str:
    return make_worker(store, name, trainers=trainers).id


def run(store: Store, campaign: int, worker: str, layout: Layout, **figures: Any) -> int:
    values = {"trainer": "theirs", "trainer_version": "1.2", **figures}
    return run_trial(store, campaign, layout, worker=worker, **values)


@pytest.mark.sqlite_is_enough(False)
def test_a_worker_gets_only_trials_of_trainers_that_it_lists(store: Store) -> None:
    campaign = campaign_of(store, "theirs")
    trial = store.trials.add(campaign, TP1)
    plain, other = make_worker(store, "plain").id, worker_with(store, "other", another="1")
    assert take_leases(store, plain, 1) == take_leases(store, other, 1) == []
    right = worker_with(store, "right", theirs="1.2")
    assert lease_one(store, right).trial_id == trial.id
    ours = store.trials.add(make_campaign(store, "ours"), TP1)
    assert lease_one(store, right).trial_id == ours.id, "it runs the embedded one too"


def test_a_measurement_carries_its_trainer_and_that_of_another_is_refused(store: Store) -> None:
    campaign, worker = campaign_of(store, "theirs"), worker_with(store, theirs="1.2")
    trial = run(store, campaign, worker, TP1, tokens="assumed")
    kept = store.trials.get(trial).measurement
    assert (kept.trainer, kept.trainer_version, kept.tokens) == ("theirs", "1.2", "assumed")
    with pytest.raises(MeasurementInvalidError, match=r"'another'.*measures with 'theirs'"):
        run(store, campaign, worker, TP2, trainer="another")


@pytest.mark.sqlite_is_enough(False)
def test_assumed_tokens_are_ranked_only_until_some_are_counted(store: Store) -> None:
    campaign, worker = campaign_of(store, "theirs"), worker_with(store, theirs="1.2")
    fast = run(store, campaign, worker, TP1, tokens="assumed", tokens_per_s=9000.0)
    slow = run(store, campaign, worker, TP2, tokens="assumed", tokens_per_s=100.0)
    assert [t.id for t in ranked_trials(store, campaign, OBJECTIVE)] == [fast, slow]
    counted = run(store, campaign, worker, TP4, tokens="counted", tokens_per_s=50.0)
    assert [t.id for t in ranked_trials(store, campaign, OBJECTIVE)] == [counted]
    run(store, campaign, worker, Layout(pp=2), tokens="assumed", tokens_per_s=8000.0)
    assert [t.id for t in ranked_trials(store, campaign, OBJECTIVE)] == [counted]


def losses(value: float | None) -> tuple[Iteration, ...]:
    plain = make_iterations(0.512, timed=1)
    return tuple(replace(each, loss=value, grad_norm=None) for each in plain)


@pytest.mark.parametrize(
    ("same_data", "other", "state"),
    [(True, 4.0, "FAILED"), (False, 4.0, "COMPLETED"), (True, None, "COMPLETED")],
)
def test_only_losses_of_the_same_data_are_compared(
    store: Store, same_data: bool, other: float | None, state: str
) -> None:
    campaign, worker = campaign_of(store, "theirs"), worker_with(store, theirs="1.2")
    for layout, loss in ((TP1, 6.0), (TP2, 6.0), (TP4, other)):
        trial = run(
            store,
            campaign,
            worker,
            layout,
            tokens_per_s=1000.0,
            iterations=losses(loss),
            losses_comparable=same_data,
        )
    assert store.trials.get(trial).state == state


def test_campaigns_learn_only_from_the_same_trainer(store: Store, clock: TurnableClock) -> None:
    box = {"cluster": {"name": "local-cpu", "device": "CPU", "num_nodes": 1, "devices_per_node": 8}}

    def ended(name: str, trainer: str, version: str, layout: Layout) -> None:
        clock.forward(1)
        campaign = campaign_of(store, trainer, name, **box)
        worker = worker_with(store, theirs=version)
        run(store, campaign, worker, layout, trainer=trainer, trainer_version=version)
        clock.forward(1)
        store.campaigns.end(campaign, "COMPLETED", "budget", "")

    ended("ours", "embedded", "1.2", TP1)
    ended("old", "theirs", "1.1", TP2)
    ended("same", "theirs", "1.2", TP4)
    clock.forward(1)
    new = store.campaigns.get(campaign_of(store, "theirs", "new", **box))
    assert [known.layout for known in store.plans.known_trials(new)] == [TP4]


def test_a_campaign_cannot_start_from_one_of_another_trainer(store: Store) -> None:
    campaign_of(store, "theirs", "first")
    with pytest.raises(CampaignInvalidError, match=r"'first' measured with trainer 'theirs'"):
        campaign_of(store, "embedded", "second", start_from=["first"])


SIMULATOR = simulator_trainer()
SIMULATION = {"seed": 7, "version": SIMULATOR_VERSION}
DAY_S = 86400.0


def simulated_campaign(store: Store, name: str = "rehearsal") -> int:
    return make_campaign(store, name, simulated=SIMULATION)


def simulated_worker(store: Store, name: str = "sim", **changes: Any) -> str:
    trainers = {SIMULATOR: str(SIMULATOR_VERSION)}
    return make_worker(
        store, name, **{"trainers": trainers, "launcher": SIMULATED_LAUNCHER, **changes}
    ).id


def simulated(
    layout: Layout | None = None, *, duration_s: float = DAY_S, **changes: Any
) -> Outcome:
    """A completed simulated probe: it has no losses."""
    timed = make_iterations(1.0)
    return completed(
        layout,
        duration_s=duration_s,
        **{
            "iterations": tuple(replace(each, loss=None, grad_norm=None) for each in timed),
            "trainer": SIMULATOR,
            "trainer_version": str(SIMULATOR_VERSION),
            "losses_comparable": False,
            **changes,
        },
    )


def rehearse(store: Store, campaign: int, worker: str, layout: Layout | None = None) -> int:
    return run_trial(store, campaign, layout, simulated(layout), worker=worker)


@pytest.mark.sqlite_is_enough(False)
def test_workers_get_only_trials_of_their_kind_and_version(store: Store) -> None:
    measured = store.trials.add(make_campaign(store), Layout()).id
    rehearsed = store.trials.add(simulated_campaign(store), Layout()).id
    old = simulated_worker(store, "old", trainers={simulator_trainer(SIMULATOR_VERSION + 1): "2"})
    assert take_leases(store, old, 9) == []
    both = {SIMULATOR: str(SIMULATOR_VERSION)}
    pretender = make_worker(store, "pretender", trainers=both).id
    assert [each.trial_id for each in take_leases(store, pretender, 9)] == [measured]
    assert lease_one(store, simulated_worker(store)).trial_id == rehearsed


def test_simulated_seconds_count_and_no_real_ones(store: Store, clock: TurnableClock) -> None:
    worker, campaign = simulated_worker(store), simulated_campaign(store)
    trial = store.trials.add(campaign, Layout()).id
    lease_one(store, worker)
    clock.forward(2)
    assert post_outcome(store, trial, 1, simulated(), iterations_s=12.0).accepted
    cost = store.campaigns.get(campaign).cost
    assert math.isclose(cost.total, DAY_S)
    stats = store.statistics.service_stats()
    assert set(stats.node_seconds.values()) == {0.0}, "metrics are of what was measured"
    assert stats.workers == {}
    record = store.trials.get(trial)
    assert record.state == "COMPLETED"
    assert (record.measurement.trainer, record.measurement.trainer_version) == (
        SIMULATOR,
        str(SIMULATOR_VERSION),
    )


def test_simulated_costs_are_those_of_the_simulated_clock(
    store: Store, clock: TurnableClock
) -> None:
    rehearsing, measuring = simulated_worker(store), make_worker(store).id
    rehearsal, measured = simulated_campaign(store), make_campaign(store)
    first, second = (store.trials.add(rehearsal, Layout(tp=tp)).id for tp in (1, 2))
    take_leases(store, rehearsing, 2)
    clock.forward(10)
    said = BeatBody(trial_id=first, attempt=1, iterations_done=3, held_s=DAY_S)
    for sender, beats, idle_s in ((rehearsing, [said], DAY_S / 2), (measuring, [], 5.0)):
        send_beats(store, sender, beats, status=StatusBody(idle_node_s=idle_s))
    store.allocations.share_idle_time()
    clock.forward(100)
    assert sorted(store.leases.expire()) == [first, second]
    cost = store.campaigns.get(rehearsal).cost
    assert (cost.lost, cost.idle) == (DAY_S, DAY_S / 2), "nothing for the second trial"
    assert store.campaigns.get(measured).cost.idle == 5.0


def test_each_kind_knows_its_own_largest_allocation_and_what_is_too_large(store: Store) -> None:
    make_worker(store, num_nodes=4)
    simulated_worker(store, num_nodes=64)
    largest = store.workers.largest_allocation
    assert (largest("local-cpu"), largest("local-cpu", is_simulated=True)) == (4, 64)
    wide = Layout(num_nodes=16, dp=128)
    measured, rehearsal = make_campaign(store), simulated_campaign(store)
    for campaign in (measured, rehearsal):
        store.trials.add(campaign, wide)
    assert [store.workers.count_too_large(each) for each in (measured, rehearsal)] == [1, 0]
    waiting = store.allocations.waiting_trials
    assert [each.campaign for each in waiting("local-cpu", limit=9)] == ["first"]
    assert [each.campaign for each in waiting("local-cpu", is_simulated=True, limit=9)] == [
        "rehearsal"
    ]


def test_trials_calibrate_campaigns_of_their_kind_alone(store: Store, clock: TurnableClock) -> None:
    # The simulated worker came last, and its versions are those of no measured campaign.
    measuring, rehearsing = make_worker(store).id, simulated_worker(store)
    measured, rehearsal = make_campaign(store), simulated_campaign(store)
    run_trial(store, measured, worker=measuring)
    for _ in range(2):
        rehearse(store, rehearsal, rehearsing)
    for campaign in (measured, rehearsal):
        clock.forward(1)
        store.campaigns.end(campaign, "COMPLETED", "budget", "")
    clock.forward(1)
    for campaign, known in ((make_campaign(store, "next"), 1), (simulated_campaign(store, "2"), 2)):
        assert store.plans.count_known_trials(store.campaigns.get(campaign)) == known
        with store._db.read() as session:
            assert len(earlier_repeats(session, campaign)) == known // 2


def test_no_campaign_starts_from_one_of_the_other_kind_by_name(store: Store) -> None:
    for name, earlier, later in (
        ("rehearsed", {"simulated": SIMULATION}, {}),
        ("measured", {}, {"simulated": SIMULATION}),
    ):
        make_campaign(store, name, **earlier)
        with pytest.raises(CampaignInvalidError, match="says nothing certain"):
            make_campaign(store, "later", start_from=[name], **later)


def test_a_plan_of_a_measured_campaign_rests_on_no_simulated_trial(store: Store) -> None:
    document = {
        "name": "rehearsal",
        "model": "tiny",
        "cluster": "local-cpu",
        "space": {"global_batch_size": 8, "tp": [1, 2], "pp": [1]},
        "budget": {"trials": 3},
        "simulated": SIMULATION,
    }
    spec = CampaignSpec.from_document(document)
    rehearsal = store.campaigns.create(spec.to_mapping(), num_legal_layouts=2).id
    rehearse(store, rehearsal, simulated_worker(store))
    planned = {**document, "name": "planned", "start_from": ["rehearsal"]}
    plans = [
        store.plans.make(CampaignSpec.from_document({**planned, "simulated": kind}), PlanOptions())
        for kind in (False, True)
    ]
    assert [each.knowledge.num_measurements for each in plans] == [0, 1]


def test_a_budget_of_wall_time_is_refused_later_too(store: Store) -> None:
    rehearsal = simulated_campaign(store)
    with pytest.raises(CampaignInvalidError, match="wall time cannot bound"):
        store.campaigns.update(rehearsal, budget={"wall_time_s": 60.0})

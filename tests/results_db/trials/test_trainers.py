"""Trainers in the database: who runs what, what is ranked together, and what is learnt from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from results_db.errors import MeasurementInvalidError
from results_db.store import Store
from search_spaces.errors import CampaignInvalidError
from search_spaces.protocol.measurement import Iteration
from search_spaces.spec.layout import Layout
from tests.kit.store import (
    TurnableClock,
    lease_one,
    make_campaign,
    make_iterations,
    make_spec,
    make_worker,
    ranked_trials,
    run_trial,
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
    assert kept is not None
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

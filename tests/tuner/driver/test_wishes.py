"""What users wish of single trials while the driver is at work."""

from __future__ import annotations

import pytest

from results_db.store import Store
from tests.kit.store import failed, ranked_trials
from tests.tuner.factories import FakeWorker, drive_until, ended, make_spec, measured, submit
from tuner.driver.driver import Driver

STRATEGIES = ["random", "deephyper", "guided", "exhaustive"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reason", ["crashed", "out_of_memory"])
def test_a_layout_that_failed_and_works_when_it_is_queued_again_is_learnt_and_ranked(
    store: Store, strategy: str, reason: str
) -> None:
    campaign = submit(store, make_spec(strategy=strategy, budget={"trials": 6}))
    driver, worker = Driver(store), FakeWorker(store)
    driver.step()
    worker.judge = lambda _layout: failed(reason)
    worker.run_one()
    (first, *_) = store.trials.find(campaign.id)
    driver.step()
    again = store.trials.requeue(first.id)
    worker.judge = measured
    drive_until(lambda: ended(store, campaign), driver.step, worker)
    record = store.campaigns.get(campaign.id)
    assert (record.state, record.reason) == ("COMPLETED", "budget"), record.message
    assert store.trials.get(again.id).state == "COMPLETED"
    ranked = ranked_trials(store, campaign.id, campaign.objective)
    assert first.layout_key in {trial.layout_key for trial in ranked}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_campaign_goes_on_without_a_trial_that_was_cancelled(store: Store, strategy: str) -> None:
    campaign = submit(store, make_spec(strategy=strategy, budget={"trials": 6}))
    driver, worker = Driver(store), FakeWorker(store)
    driver.step()
    (first, *_) = store.trials.find(campaign.id)
    store.trials.cancel(first.id)
    drive_until(lambda: ended(store, campaign), driver.step, worker)
    states = [trial.state for trial in store.trials.find(campaign.id)]
    assert (states.count("CANCELLED"), states.count("COMPLETED")) == (1, 6)


def test_repeats_that_are_wished_count_in_the_budget_and_are_waited_for(store: Store) -> None:
    campaign = submit(store, make_spec(strategy="exhaustive", budget={"trials": 6}))
    driver, worker = Driver(store), FakeWorker(store)
    driver.step()
    worker.run_one()
    (first, *_) = store.trials.find(campaign.id)
    store.trials.measure_again(first.id, times=8)
    drive_until(lambda: ended(store, campaign), driver.step, worker)
    trials = store.trials.find(campaign.id)
    assert {trial.state for trial in trials} == {"COMPLETED"}
    assert sum(trial.repeat_of == first.id for trial in trials) == 8
    assert store.campaigns.get(campaign.id).reason == "budget"

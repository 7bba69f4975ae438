"""What users wish of single trials while the driver is at work."""

from __future__ import annotations

import pytest

from results_db.store import Store
from tests.kit.store import failed, ranked_trials
from tests.tuner.factories import DrivenCampaign, make_spec, measured


@pytest.mark.parametrize(
    ("strategy", "reason"), [("random", "crashed"), ("guided", "out_of_memory")]
)
def test_a_layout_that_failed_and_works_when_it_is_queued_again_is_learnt_and_ranked(
    store: Store, strategy: str, reason: str
) -> None:
    spec = make_spec(strategy=strategy, budget={"trials": 3})
    campaign = DrivenCampaign(store, spec, lambda _layout: failed(reason))
    campaign.turn()
    campaign.step()
    first = campaign.trials[0]
    again = store.trials.requeue(first.id)
    campaign.worker.judge = measured
    record = campaign.to_end()
    assert (record.state, record.reason) == ("COMPLETED", "budget"), record.message
    assert store.trials.get(again.id).state == "COMPLETED"
    ranked = ranked_trials(store, campaign.id, record.objective)
    assert first.layout_key in {trial.layout_key for trial in ranked}


@pytest.mark.parametrize("strategy", ["guided", "exhaustive"])
def test_a_campaign_goes_on_without_a_trial_that_was_cancelled(store: Store, strategy: str) -> None:
    campaign = DrivenCampaign(store, make_spec(strategy=strategy, budget={"trials": 3}))
    campaign.step()
    store.trials.cancel(campaign.trials[0].id)
    campaign.to_end()
    assert (campaign.count("CANCELLED"), campaign.count()) == (1, 3)


def test_repeats_that_are_wished_count_in_the_budget_and_are_waited_for(store: Store) -> None:
    campaign = DrivenCampaign(store, make_spec(strategy="exhaustive", budget={"trials": 6}))
    campaign.turn()
    first = campaign.trials[0]
    store.trials.measure_again(first.id, times=8)
    assert campaign.to_end().reason == "budget"
    assert [trial.state for trial in campaign.trials] == ["COMPLETED"] * 10, "one more waited"
    assert [trial.repeat_of for trial in campaign.repeats] == [first.id] * 8

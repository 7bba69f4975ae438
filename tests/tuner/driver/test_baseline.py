"""The baseline is measured first and once, whatever strategy searches and however often."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from results_db.store import Store
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.protocol.outcome import Outcome
from search_spaces.spec.layout import Layout
from tests.kit.store import completed, failed, post_outcome, take_leases
from tests.tuner.factories import (
    DrivenCampaign,
    FakeWorker,
    layouts_of,
    make_spec,
    measured,
    run_campaign,
)
from tuner.driver.campaign_search import CampaignSearch

INSIDE = {"tp": 4, "pp": 2, "micro_batch_size": 2}
OUTSIDE = {"tp": 2, "recompute": "full"}
STRATEGIES = ["random", "deephyper", "guided", "model-only", "exhaustive"]


def with_baseline(baseline: dict[str, Any] = INSIDE, **changes: Any) -> CampaignSpec:
    return make_spec(**{"baseline": baseline, **changes})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("baseline", [INSIDE, OUTSIDE], ids=["inside", "outside"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_measured_first_and_counts_in_the_budget(
    store: Store, strategy: str, baseline: dict[str, Any]
) -> None:
    spec = with_baseline(baseline, strategy=strategy)
    campaign = run_campaign(store, spec)
    trials = store.trials.find(campaign.id)
    assert campaign.message == "6 of 6 trials done (6 completed)"
    assert trials[0].layout == spec.baseline
    first = [trial for trial in trials if trial.repeat_of is None]
    assert [trial.is_baseline for trial in first] == [True] + [False] * (len(first) - 1)
    assert len(set(layouts_of(first))) == len(first)


@pytest.mark.parametrize(("baseline", "more"), [(INSIDE, 0), (OUTSIDE, 1)])
def test_an_exhaustive_campaign_measures_no_layout_twice(
    store: Store, baseline: dict[str, Any], more: int
) -> None:
    spec = with_baseline(baseline, strategy="exhaustive", budget={})
    campaign = run_campaign(store, spec)
    tried = layouts_of(store.trials.find(campaign.id))
    assert campaign.reason == "exhausted"
    assert tried[0] == spec.baseline
    assert len(tried) == len(set(tried)) == len(spec.legal_set()) + more


def test_several_workers_start_with_it_and_go_on_beside_it(store: Store) -> None:
    spec = with_baseline(strategy="guided")
    campaign = DrivenCampaign(store, spec)
    campaign.workers += [FakeWorker(store, name=f"w{number}") for number in range(2, 4)]
    campaign.step()
    waiting = campaign.trials
    assert len(waiting) > 2
    assert waiting[0].layout == spec.baseline
    (first,) = take_leases(store, campaign.worker.id, 1)
    assert first.layout == spec.baseline
    campaign.until_completed(5)
    post_outcome(store, first.trial_id, first.attempt, measured(first.layout))
    campaign.to_end()
    assert len(set(layouts_of(campaign.trials))) == 6


@pytest.mark.parametrize("baseline", [INSIDE, OUTSIDE], ids=["inside", "outside"])
def test_a_driver_that_dies_at_any_turn_proposes_it_once(
    store: Store, baseline: dict[str, Any]
) -> None:
    spec = with_baseline(baseline, strategy="guided", budget={"trials": 8})
    campaign = DrivenCampaign(store, spec, mortality=0.5, dice_seed=3)
    campaign.to_end()
    assert len(campaign.drivers) > 3
    first = [trial for trial in campaign.trials if trial.repeat_of is None]
    assert len(set(layouts_of(first))) == len(first)
    assert len(campaign.trials) == 8
    assert [trial.number for trial in first if trial.is_baseline] == [1]


def test_a_cancelled_baseline_is_not_proposed_again(store: Store) -> None:
    campaign = DrivenCampaign(store, with_baseline(), mortality=1.0)
    campaign.step()
    store.trials.cancel(store.trials.by_number(campaign.id, 1).id)
    campaign.to_end()
    assert [trial.state for trial in campaign.trials if trial.is_baseline] == ["CANCELLED"]


def test_an_interrupted_search_goes_the_way_of_an_uninterrupted_one(store: Store) -> None:
    ways = []
    for name, mortality in (("a", 0.0), ("b", 1.0)):
        spec = with_baseline(name=name, strategy="guided", knowledge="none")
        campaign = DrivenCampaign(store, spec, mortality=mortality)
        campaign.to_end()
        ways.append(layouts_of(campaign.trials))
    assert ways[0] == ways[1]


@pytest.mark.parametrize(("baseline", "reason"), [(INSIDE, "out_of_memory"), (OUTSIDE, "crashed")])
def test_one_that_fails_is_reported_and_the_campaign_goes_on(
    store: Store, baseline: dict[str, Any], reason: str
) -> None:
    spec = with_baseline(baseline)

    def judge(layout: Layout) -> Outcome:
        return failed(reason) if layout == spec.baseline else measured(layout)

    campaign = run_campaign(store, spec, judge)
    found = store.baselines.of_campaigns([campaign])[campaign.id]
    assert (found.trial_number, found.reason) == (1, reason)
    assert (found.value, found.gain) == (None, None)
    assert store.campaigns.count_trials(campaign.id)["COMPLETED"] == 5
    assert campaign.state == "COMPLETED"


def test_the_search_learns_from_it_where_it_is_inside(store: Store) -> None:
    spec = with_baseline(strategy="random", budget={"trials": 2})
    campaign = run_campaign(store, spec)
    trials = store.trials.find(campaign.id)
    history = CampaignSearch.rebuild(campaign, trials)._strategy._history
    assert spec.baseline is not None
    index = spec.legal_set().index_of(spec.baseline)
    assert history.observations[index].objective == trials[0].objective(spec.objective)


def test_one_outside_of_the_space_is_no_warning(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="tuner"):
        campaign = run_campaign(store, with_baseline(OUTSIDE, strategy="guided"))
        CampaignSearch.rebuild(campaign, store.trials.find(campaign.id))
    assert caplog.records == []


def test_a_campaign_whose_winner_is_outside_of_the_space_ends_in_order(store: Store) -> None:
    spec = with_baseline(OUTSIDE, strategy="guided", stop={"remeasure": 2}, budget={"trials": 12})

    def judge(layout: Layout) -> Outcome:
        fast = completed(layout, tokens_per_s=1e5)
        return fast if layout == spec.baseline else measured(layout)

    campaign = run_campaign(store, spec, judge)
    assert (campaign.state, campaign.reason) == ("COMPLETED", "budget")
    gain = store.baselines.of_campaigns([campaign])[campaign.id].gain
    assert gain is not None
    assert (gain.ratio, gain.ratio_low, gain.ratio_high) == (1.0, 1.0, 1.0)


def test_a_campaign_that_starts_from_another_measures_its_own(store: Store) -> None:
    spec = with_baseline()
    run_campaign(store, spec)
    changes = {"strategy": "guided", "budget": {"trials": 2}, "start_from": ["first"]}
    again = run_campaign(store, with_baseline(name="second", **changes))
    (first, *_) = store.trials.find(again.id)
    assert first.layout == spec.baseline
    assert first.is_baseline


def test_repeats_of_it_are_marked_too(store: Store) -> None:
    campaign = DrivenCampaign(store, with_baseline())
    campaign.turn()
    assert store.trials.repeat(1).is_baseline
    assert campaign.record.state == "RUNNING"

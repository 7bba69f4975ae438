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
every_baseline = pytest.mark.parametrize("baseline", [INSIDE, OUTSIDE], ids=["inside", "outside"])


def with_baseline(baseline: dict[str, Any] = INSIDE, **changes: Any) -> CampaignSpec:
    return make_spec(**{"baseline": baseline, **changes})


@pytest.mark.parametrize(
    ("strategy", "baseline"),
    [("random", OUTSIDE), ("deephyper", INSIDE), ("guided", OUTSIDE), ("model-only", INSIDE)],
)
def test_a_baseline_is_measured_first_and_counts_in_the_budget(
    store: Store, strategy: str, baseline: dict[str, Any]
) -> None:
    spec = with_baseline(baseline, strategy=strategy, budget={"trials": 3})
    campaign = run_campaign(store, spec)
    trials = store.trials.find(campaign.id)
    assert campaign.message == "3 of 3 trials done (3 completed)"
    assert trials[0].layout == spec.baseline
    first = [trial for trial in trials if trial.repeat_of is None]
    assert [trial.is_baseline for trial in first] == [True] + [False] * (len(first) - 1)
    assert len(set(layouts_of(first))) == len(first)


@pytest.mark.parametrize(("baseline", "more"), [(INSIDE, 0), (OUTSIDE, 1)])
def test_an_exhaustive_campaign_measures_no_layout_twice(
    store: Store, baseline: dict[str, Any], more: int
) -> None:
    space = {"global_batch_size": 16, "tp": [1, 4], "pp": [1, 2], "micro_batch_size": 2}
    spec = with_baseline(baseline, strategy="exhaustive", budget={}, space=space)
    campaign = run_campaign(store, spec)
    tried = layouts_of(store.trials.find(campaign.id))
    assert campaign.reason == "exhausted"
    assert tried[0] == spec.baseline
    assert len(tried) == len(set(tried)) == len(spec.legal_set()) + more


def test_several_workers_start_with_the_baseline_and_go_on_beside_it(store: Store) -> None:
    campaign = DrivenCampaign(store, with_baseline(strategy="guided"))
    campaign.workers += [FakeWorker(store, name=f"w{number}") for number in range(2, 4)]
    campaign.step()
    assert len(campaign.trials) > 2
    (first,) = take_leases(store, campaign.worker.id, 1)
    assert first.layout == campaign.trials[0].layout == with_baseline().baseline
    campaign.until_completed(5)
    post_outcome(store, first.trial_id, first.attempt, measured(first.layout))
    campaign.to_end()
    assert len(set(layouts_of(campaign.trials))) == 6


@every_baseline
def test_drivers_that_die_at_every_turn_propose_the_baseline_once_and_search_as_one_driver(
    store: Store, baseline: dict[str, Any]
) -> None:
    ways = []
    for name, mortality in (("a", 0.0), ("b", 1.0)):
        spec = with_baseline(baseline, name=name, strategy="guided", knowledge="none")
        campaign = DrivenCampaign(store, spec, mortality=mortality)
        campaign.to_end()
        ways.append(layouts_of(campaign.trials))
        first = [trial for trial in campaign.trials if trial.repeat_of is None]
        assert [trial.number for trial in first if trial.is_baseline] == [1]
        assert len(set(layouts_of(first))) == len(first)
    assert len(campaign.drivers) > 3
    assert ways[0] == ways[1]


def test_a_cancelled_baseline_is_not_proposed_again(store: Store) -> None:
    campaign = DrivenCampaign(store, with_baseline(budget={"trials": 2}), mortality=1.0)
    campaign.step()
    store.trials.cancel(store.trials.by_number(campaign.id, 1).id)
    campaign.to_end()
    assert [trial.state for trial in campaign.trials if trial.is_baseline] == ["CANCELLED"]


@pytest.mark.parametrize(("baseline", "reason"), [(INSIDE, "out_of_memory"), (OUTSIDE, "crashed")])
def test_a_baseline_that_fails_is_reported_and_the_campaign_goes_on(
    store: Store, baseline: dict[str, Any], reason: str
) -> None:
    spec = with_baseline(baseline, budget={"trials": 2})

    def judge(layout: Layout) -> Outcome:
        return failed(reason) if layout == spec.baseline else measured(layout)

    campaign = run_campaign(store, spec, judge)
    found = store.baselines.of_campaigns([campaign])[campaign.id]
    assert (found.trial_number, found.reason) == (1, reason)
    assert (found.value, found.gain) == (None, None)
    assert store.campaigns.count_trials(campaign.id)["COMPLETED"] == 1
    assert campaign.state == "COMPLETED"


@every_baseline
def test_the_search_learns_from_a_baseline_inside_and_one_outside_is_no_warning(
    store: Store, caplog: pytest.LogCaptureFixture, baseline: dict[str, Any]
) -> None:
    spec = with_baseline(baseline, strategy="guided", budget={"trials": 2})
    with caplog.at_level(logging.WARNING, logger="tuner"):
        campaign = run_campaign(store, spec)
        trials = store.trials.find(campaign.id)
        search = CampaignSearch.rebuild(campaign, trials)
    assert caplog.records == []
    index = spec.legal_set().index_of(spec.baseline)
    told = search._strategy._history.observations.get(index)
    expected = None if baseline == OUTSIDE else trials[0].objective(spec.objective)
    assert (told and told.objective) == expected


def test_a_campaign_whose_winner_is_outside_of_the_space_ends_in_order(store: Store) -> None:
    spec = with_baseline(OUTSIDE, strategy="guided", stop={"remeasure": 2}, budget={"trials": 8})

    def judge(layout: Layout) -> Outcome:
        fast = completed(layout, tokens_per_s=1e5)
        return fast if layout == spec.baseline else measured(layout)

    campaign = run_campaign(store, spec, judge)
    assert (campaign.state, campaign.reason) == ("COMPLETED", "budget")
    gain = store.baselines.of_campaigns([campaign])[campaign.id].gain
    assert (gain.ratio, gain.ratio_low, gain.ratio_high) == (1.0, 1.0, 1.0)


def test_a_campaign_that_starts_from_another_measures_its_own_baseline(store: Store) -> None:
    spec = with_baseline(budget={"trials": 1})
    run_campaign(store, spec)
    changes = {"strategy": "guided", "budget": {"trials": 1}, "start_from": ["first"]}
    again = run_campaign(store, with_baseline(name="second", **changes))
    (first, *_) = store.trials.find(again.id)
    assert first.layout == spec.baseline
    assert first.is_baseline

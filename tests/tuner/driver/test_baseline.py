"""The baseline is measured first and once, whatever strategy searches and however often."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from results_db.records import CampaignRecord
from results_db.store import Store
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.protocol.outcome import Outcome
from search_spaces.spec.layout import Layout
from tests.kit.store import completed, failed, post_outcome, take_leases
from tests.tuner.factories import (
    FakeWorker,
    drive_until,
    ended,
    layouts_of,
    make_spec,
    measured,
    submit,
)
from tuner.driver.campaign_search import CampaignSearch
from tuner.driver.driver import Driver

INSIDE = {"tp": 4, "pp": 2, "micro_batch_size": 2}
OUTSIDE = {"tp": 2, "recompute": "full"}
STRATEGIES = ["random", "deephyper", "guided", "model-only", "exhaustive"]


def with_baseline(baseline: dict[str, Any] = INSIDE, **changes: Any) -> CampaignSpec:
    return make_spec(**{"baseline": baseline, **changes})


def run(store: Store, spec: CampaignSpec, *workers: FakeWorker) -> CampaignRecord:
    campaign = submit(store, spec)
    drive_until(
        lambda: ended(store, campaign), Driver(store).step, *(workers or [FakeWorker(store)])
    )
    return store.campaigns.get(campaign.id)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("baseline", [INSIDE, OUTSIDE], ids=["inside", "outside"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_is_measured_first_and_counts_in_the_budget(
    store: Store, strategy: str, baseline: dict[str, Any]
) -> None:
    spec = with_baseline(baseline, strategy=strategy)
    campaign = run(store, spec)
    trials = store.trials.find(campaign.id)
    assert campaign.message == "6 of 6 trials done (6 completed)"
    assert trials[0].layout == spec.baseline
    first = [trial for trial in trials if trial.repeat_of is None]
    assert [trial.is_baseline for trial in first] == [True] + [False] * (len(first) - 1)
    assert len(set(layouts_of(first))) == len(first)


def test_a_budget_of_one_trial_measures_it_alone(store: Store) -> None:
    spec = with_baseline(budget={"trials": 1})
    campaign = run(store, spec)
    assert layouts_of(store.trials.find(campaign.id)) == [spec.baseline]
    assert campaign.reason == "budget"


@pytest.mark.parametrize(("baseline", "more"), [(INSIDE, 0), (OUTSIDE, 1)])
def test_an_exhaustive_campaign_measures_no_layout_twice(
    store: Store, baseline: dict[str, Any], more: int
) -> None:
    spec = with_baseline(baseline, strategy="exhaustive", budget={})
    campaign = run(store, spec)
    tried = layouts_of(store.trials.find(campaign.id))
    assert campaign.reason == "exhausted"
    assert tried[0] == spec.baseline
    assert len(tried) == len(set(tried)) == len(spec.legal_set()) + more


def test_several_workers_start_with_it_and_go_on_beside_it(store: Store) -> None:
    spec = with_baseline(strategy="guided")
    campaign = submit(store, spec)
    workers = [FakeWorker(store, name=f"w{number}") for number in range(3)]
    Driver(store).step()
    waiting = store.trials.find(campaign.id)
    assert len(waiting) > 2
    assert waiting[0].layout == spec.baseline
    (first,) = take_leases(store, workers[0].id, 1)
    assert first.layout == spec.baseline
    drive_until(
        lambda: store.campaigns.count_trials(campaign.id)["COMPLETED"] == 5,
        Driver(store).step,
        *workers,
    )
    post_outcome(store, first.trial_id, first.attempt, measured(first.layout))
    drive_until(lambda: ended(store, campaign), Driver(store).step, *workers)
    assert len(set(layouts_of(store.trials.find(campaign.id)))) == 6


@pytest.mark.parametrize("baseline", [INSIDE, OUTSIDE], ids=["inside", "outside"])
def test_a_driver_that_dies_at_any_turn_proposes_it_once(
    store: Store, baseline: dict[str, Any]
) -> None:
    spec = with_baseline(baseline, strategy="guided", budget={"trials": 8})
    campaign = submit(store, spec)
    dice = random.Random(3)
    drivers = [Driver(store)]

    def step_or_die() -> None:
        if dice.random() < 0.5:
            drivers.append(Driver(store))
        drivers[-1].step()

    drive_until(lambda: ended(store, campaign), step_or_die, FakeWorker(store))
    trials = store.trials.find(campaign.id)
    assert len(drivers) > 3
    first = [trial for trial in trials if trial.repeat_of is None]
    assert len(set(layouts_of(first))) == len(first)
    assert len(trials) == 8
    assert [trial.number for trial in first if trial.is_baseline] == [1]


def test_one_that_was_cancelled_is_not_proposed_again(store: Store) -> None:
    spec = with_baseline()
    campaign = submit(store, spec)
    driver = Driver(store)
    driver.step()
    store.trials.cancel(store.trials.by_number(campaign.id, 1).id)
    drive_until(lambda: ended(store, campaign), lambda: Driver(store).step(), FakeWorker(store))
    baselines = [trial for trial in store.trials.find(campaign.id) if trial.is_baseline]
    assert [trial.state for trial in baselines] == ["CANCELLED"]


def test_an_interrupted_search_goes_the_way_of_an_uninterrupted_one(store: Store) -> None:
    specs = [with_baseline(name=name, strategy="guided", knowledge="none") for name in ("a", "b")]
    worker = FakeWorker(store)
    one = submit(store, specs[0])
    drive_until(lambda: ended(store, one), Driver(store).step, worker)
    two = submit(store, specs[1])
    drive_until(lambda: ended(store, two), lambda: Driver(store).step(), worker)
    assert layouts_of(store.trials.find(one.id)) == layouts_of(store.trials.find(two.id))


@pytest.mark.parametrize(("baseline", "reason"), [(INSIDE, "out_of_memory"), (OUTSIDE, "crashed")])
def test_one_that_fails_is_reported_and_the_campaign_goes_on(
    store: Store, baseline: dict[str, Any], reason: str
) -> None:
    spec = with_baseline(baseline)

    def judge(layout: Layout) -> Outcome:
        return failed(reason) if layout == spec.baseline else measured(layout)

    campaign = run(store, spec, FakeWorker(store, judge))
    found = store.baselines.of_campaigns([campaign])[campaign.id]
    assert (found.trial_number, found.reason) == (1, reason)
    assert (found.value, found.gain) == (None, None)
    assert store.campaigns.count_trials(campaign.id)["COMPLETED"] == 5
    assert campaign.state == "COMPLETED"


def test_the_search_learns_from_it_where_it_is_inside(store: Store) -> None:
    spec = with_baseline(strategy="random", budget={"trials": 2})
    campaign = run(store, spec)
    trials = store.trials.find(campaign.id)
    search = CampaignSearch.rebuild(campaign, trials)
    assert spec.baseline is not None
    index = spec.legal_set().index_of(spec.baseline)
    value = trials[0].objective(spec.objective)
    assert search._strategy._history.observations[index].objective == value


def test_one_outside_of_the_space_is_no_warning(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="tuner"):
        campaign = run(store, with_baseline(OUTSIDE, strategy="guided"))
        CampaignSearch.rebuild(campaign, store.trials.find(campaign.id))
    assert caplog.records == []


def test_a_campaign_whose_winner_is_outside_of_the_space_ends_in_order(store: Store) -> None:
    spec = with_baseline(OUTSIDE, strategy="guided", stop={"remeasure": 2}, budget={"trials": 12})

    def judge(layout: Layout) -> Outcome:
        fast = completed(layout, tokens_per_s=1e5)
        return fast if layout == spec.baseline else measured(layout)

    campaign = run(store, spec, FakeWorker(store, judge))
    assert (campaign.state, campaign.reason) == ("COMPLETED", "budget")
    gain = store.baselines.of_campaigns([campaign])[campaign.id].gain
    assert gain is not None
    assert (gain.ratio, gain.ratio_low, gain.ratio_high) == (1.0, 1.0, 1.0)


def test_a_campaign_that_starts_from_another_measures_its_own(store: Store) -> None:
    spec = with_baseline()
    run(store, spec)
    again = run(
        store,
        with_baseline(name="second", strategy="guided", budget={"trials": 2}, start_from=["first"]),
    )
    (first, *_) = store.trials.find(again.id)
    assert first.layout == spec.baseline
    assert first.is_baseline


def test_repeats_of_it_are_marked_too(store: Store) -> None:
    campaign = submit(store, with_baseline())
    Driver(store).step()
    FakeWorker(store).run_one()
    assert store.trials.repeat(1).is_baseline
    assert store.campaigns.get(campaign.id).state == "RUNNING"


@pytest.mark.parametrize("strategy", ["exhaustive", "random"])
def test_the_strategy_does_not_propose_it_again(store: Store, strategy: str) -> None:
    spec = with_baseline(strategy=strategy)
    search = CampaignSearch.rebuild(submit(store, spec), [])
    asked = list(iter(search.ask, None))
    assert asked[0] == spec.baseline
    assert len(asked) == len(set(asked)) == len(spec.legal_set())

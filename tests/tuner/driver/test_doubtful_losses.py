"""Campaigns in which some layout computes something else: what is repeated, ranked and learnt."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from results_db.records import CampaignRecord, TrialRecord
from results_db.store import Store
from search_spaces.protocol.outcome import Outcome
from search_spaces.spec.layout import Layout
from tests.kit.postgres import upgraded
from tests.kit.store import (
    TimelyStore,
    TurnableClock,
    completed,
    make_measurement,
    ranked_trials,
)
from tests.tuner.factories import FakeWorker, drive_until, ended, make_spec, submit
from tuner.driver.campaign_search import CampaignSearch
from tuner.driver.driver import Driver


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = TimelyStore.open(upgraded(tmp_path / "data"), clock=TurnableClock())
    yield store
    store.close()


def trained(layout: Layout, *, is_off: bool) -> Outcome:
    """The odd ones are faster than all others."""
    iterations = tuple(
        replace(i, loss=i.loss + 0.3 * is_off) for i in make_measurement(layout).iterations
    )
    speed = 9000.0 if is_off else 1000.0 / (layout.tp + layout.pp)
    return completed(layout, iterations=iterations, tokens_per_s=speed * layout.num_devices)


def those_off(is_off: Callable[[Layout], bool]) -> Callable[[Layout], Outcome]:
    return lambda layout: trained(layout, is_off=is_off(layout))


def of_state(trials: list[TrialRecord], state: str) -> list[TrialRecord]:
    return [trial for trial in trials if trial.state == state]


def assert_the_odd_ones_lost(
    store: Store, campaign: CampaignRecord, is_off: Callable[[Layout], bool]
) -> None:
    trials = store.trials.find(campaign.id)
    assert {is_off(trial.layout) for trial in of_state(trials, "FAILED")} == {True}
    assert {is_off(trial.layout) for trial in of_state(trials, "COMPLETED")} == {False}
    assert not is_off(ranked_trials(store, campaign.id, campaign.objective)[0].layout)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_an_odd_layout_loses_whenever_it_comes_and_repeats_are_few(
    store: Store, place: int
) -> None:
    spec = make_spec(strategy="exhaustive", budget={"trials": 10})
    odd = spec.legal_set().layout(place)
    campaign = submit(store, spec)
    worker = FakeWorker(store, those_off(lambda layout: layout == odd))
    drive_until(lambda: ended(store, campaign), Driver(store).step, worker)
    assert_the_odd_ones_lost(store, campaign, lambda layout: layout == odd)
    trials = store.trials.find(campaign.id)
    assert len(trials) == 10, "repeats count for the budget"
    repeats = [trial.layout for trial in trials if trial.repeat_of is not None]
    if place < 2:
        # The first two contradict each other; a third may come before their repeats do.
        assert set(repeats) <= {spec.legal_set().layout(0), spec.legal_set().layout(1)}
    else:
        assert repeats == [], "others had agreed before"


def test_both_are_measured_again_where_nobody_else_can_tell(store: Store) -> None:
    spec = make_spec(
        strategy="exhaustive",
        space={"global_batch_size": 16, "tp": [1, 2], "pp": 1, "dp": 1},
        budget={"trials": 9},
    )
    assert len(spec.legal_set()) == 2
    campaign = submit(store, spec)
    odd = spec.legal_set().layout(0)
    worker = FakeWorker(store, those_off(lambda layout: layout == odd))
    drive_until(lambda: ended(store, campaign), Driver(store).step, worker)
    trials = store.trials.find(campaign.id)
    assert [trial.repeat_of for trial in trials] == [None, None, trials[0].id, trials[1].id]
    assert [trial.state for trial in trials] == ["COMPLETED", "FAILED"] * 2
    assert (store.campaigns.get(campaign.id).reason) == "exhausted"


def test_repeats_stop_where_the_budget_of_trials_does(store: Store) -> None:
    spec = make_spec(strategy="exhaustive", budget={"trials": 2})
    campaign = submit(store, spec)
    odd = spec.legal_set().layout(0)
    worker = FakeWorker(store, those_off(lambda layout: layout == odd))
    drive_until(lambda: ended(store, campaign), Driver(store).step, worker)
    assert [trial.state for trial in store.trials.find(campaign.id)] == ["COMPLETED", "FAILED"]
    assert store.campaigns.get(campaign.id).message.startswith("2 of 2 trials done")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["random", "deephyper"])
@pytest.mark.parametrize("dice_seed", [1, 2, 3])
def test_a_driver_that_dies_at_any_turn_repeats_each_of_the_doubtful_once(
    store: Store, strategy: str, dice_seed: int
) -> None:
    spec = make_spec(strategy=strategy, budget={"trials": 16})
    campaign = submit(store, spec)
    odd: list[Layout] = []

    def judge(layout: Layout) -> Outcome:
        if not odd:
            odd.append(layout)  # the first one of all
        return trained(layout, is_off=layout in odd)

    dice = random.Random(dice_seed)
    drivers = [Driver(store)]

    def step_or_die() -> None:
        if dice.random() < 0.4:
            drivers.append(Driver(store))
        drivers[-1].step()

    drive_until(lambda: ended(store, campaign), step_or_die, FakeWorker(store, judge))
    assert len(drivers) > 3
    assert_the_odd_ones_lost(store, campaign, lambda layout: layout in odd)
    repeats = [trial.repeat_of for trial in store.trials.find(campaign.id) if trial.repeat_of]
    assert len(repeats) == len(set(repeats))


@pytest.mark.parametrize("strategy", ["random", "deephyper"])
def test_a_search_that_heard_a_verdict_turn_is_the_one_rebuilt_from_the_database(
    store: Store, strategy: str
) -> None:
    spec = make_spec(strategy=strategy, budget={"trials": 30})
    campaign = submit(store, spec)
    odd: list[Layout] = []

    def judge(layout: Layout) -> Outcome:
        if not odd:
            odd.append(layout)
        return trained(layout, is_off=layout in odd)

    driver, worker = Driver(store), FakeWorker(store, judge)
    turned = False
    for _ in range(12):
        driver.step()
        worker.run_one()
        driver.step()
        first = store.trials.by_number(campaign.id, 1)
        turned = turned or first.state == "FAILED"
        live = driver._searches[campaign.id]
        rebuilt = CampaignSearch.rebuild(campaign, store.trials.find(campaign.id))
        assert _told(live) == _told(rebuilt)
    assert turned, "the first trial was the odd one"


def _told(search: CampaignSearch) -> tuple[list[tuple[int, object]], list[int], int]:
    history = search._strategy._history  # type: ignore[attr-defined]
    return list(history.observations.items()), list(history.pending), history.num_free

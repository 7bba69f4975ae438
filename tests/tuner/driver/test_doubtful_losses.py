"""Campaigns in which some layout computes something else: what is repeated, ranked and learnt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from results_db.store import Store
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.protocol.outcome import Outcome
from search_spaces.spec.layout import Layout
from tests.kit.store import completed, make_measurement, ranked_trials
from tests.tuner.factories import DrivenCampaign, make_spec
from tuner.driver.campaign_search import CampaignSearch


def trained(layout: Layout, *, is_off: bool) -> Outcome:
    """The odd ones are faster than all others."""
    iterations = tuple(
        replace(i, loss=i.loss + 0.3 * is_off) for i in make_measurement(layout).iterations
    )
    speed = 9000.0 if is_off else 1000.0 / (layout.tp + layout.pp)
    return completed(layout, iterations=iterations, tokens_per_s=speed * layout.num_devices)


def driven(store: Store, spec: CampaignSpec, odd: Layout) -> DrivenCampaign:
    """The ended campaign in which one layout is odd."""
    campaign = DrivenCampaign(store, spec, lambda layout: trained(layout, is_off=layout == odd))
    campaign.to_end()
    return campaign


def first_is_odd() -> Callable[[Layout], Outcome]:
    """A judge for which the first layout that it sees is the odd one."""
    odd: list[Layout] = []

    def judge(layout: Layout) -> Outcome:
        if not odd:
            odd.append(layout)
        return trained(layout, is_off=layout in odd)

    return judge


def assert_the_odd_one_lost(campaign: DrivenCampaign, odd: Layout) -> None:
    trials = campaign.trials
    assert {trial.layout == odd for trial in trials if trial.state == "FAILED"} == {True}
    assert odd not in [trial.layout for trial in trials if trial.state == "COMPLETED"]
    ranked = ranked_trials(campaign.store, campaign.id, campaign.record.objective)
    assert ranked[0].layout != odd


@pytest.mark.parametrize("place", [1, 3])
def test_a_layout_with_other_losses_fails_whenever_it_comes_and_few_are_repeated(
    store: Store, place: int
) -> None:
    spec = make_spec(strategy="exhaustive", budget={"trials": 8})
    legal = spec.legal_set()
    campaign = driven(store, spec, legal.layout(place))
    assert_the_odd_one_lost(campaign, legal.layout(place))
    assert len(campaign.trials) == 8, "repeats count for the budget"
    repeats = {trial.layout for trial in campaign.repeats}
    # The first two contradict each other; a third may come before their repeats do. Before a
    # later one, others had agreed.
    assert repeats <= ({legal.layout(0), legal.layout(1)} if place < 2 else set())


def test_two_layouts_that_contradict_each_other_are_both_measured_again(store: Store) -> None:
    spec = make_spec(
        strategy="exhaustive",
        space={"global_batch_size": 16, "tp": [1, 2], "pp": 1, "dp": 1},
        budget={"trials": 9},
    )
    assert len(spec.legal_set()) == 2
    campaign = driven(store, spec, spec.legal_set().layout(0))
    trials = campaign.trials
    assert [trial.repeat_of for trial in trials] == [None, None, trials[0].id, trials[1].id]
    assert [trial.repeat_reason for trial in trials] == [None, None, "doubted", "doubted"]
    assert [trial.state for trial in trials] == ["COMPLETED", "FAILED"] * 2
    assert campaign.record.reason == "exhausted"


@pytest.mark.parametrize(
    ("strategy", "dice_seed"), [("random", 1), pytest.param("deephyper", 2, marks=pytest.mark.slow)]
)
def test_a_driver_that_dies_at_any_turn_repeats_each_of_the_doubtful_once(
    store: Store, strategy: str, dice_seed: int
) -> None:
    spec = make_spec(strategy=strategy, budget={"trials": 12})
    campaign = DrivenCampaign(store, spec, first_is_odd(), mortality=0.5, dice_seed=dice_seed)
    campaign.to_end()
    assert len(campaign.drivers) > 3
    assert_the_odd_one_lost(campaign, campaign.trials[0].layout)
    repeats = [trial.repeat_of for trial in campaign.repeats]
    assert len(repeats) == len(set(repeats))


def test_a_search_that_heard_a_verdict_turn_is_the_one_rebuilt_from_the_database(
    store: Store,
) -> None:
    campaign = DrivenCampaign(store, make_spec(budget={"trials": 30}), first_is_odd())
    turned = False
    for _ in range(6):
        campaign.turn()
        campaign.step()
        turned = turned or campaign.trials[0].state == "FAILED"
        live = campaign.driver._searches[campaign.id]
        rebuilt = CampaignSearch.rebuild(campaign.record, campaign.trials)
        assert _told(live) == _told(rebuilt)
    assert turned, "the first trial was the odd one"


def _told(search: CampaignSearch) -> tuple[list[tuple[int, object]], list[int], int]:
    history = search._strategy._history  # type: ignore[attr-defined]
    return list(history.observations.items()), list(history.pending), history.num_free

"""Which layouts are measured again: the best ones before an end, those that users wish, and those
whose losses are off."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.predictions.estimates.step_time import step_time_s
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.results_db.records import RepeatReason, TrialRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign_settings import Budget
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.tuner.driver.campaign_end import Spent, is_reserved
from layout_tuner.tuner.driver.campaign_search import CampaignSearch
from layout_tuner.tuner.driver.remeasuring import most_doubted
from layout_tuner.tuner.strategies import registry
from layout_tuner.tuner.strategies.ask_and_tell import History, Proposer
from layout_tuner.tuner.strategies.registry import FixedOrderProposer
from layout_tuner.tuner.strategies.search_problem import SearchProblem
from tests.kit.store import (
    TimelyStore,
    TurnableClock,
    completed,
    failed,
    make_measurement,
    ranked_trials,
)
from tests.tuner.factories import DrivenCampaign, make_spec, measured

FEW = {"global_batch_size": 16, "tp": [1, 2, 4], "pp": [1, 2], "micro_batch_size": 1}
"""A space of six legal layouts."""


def noisy(layout: Layout, dice: random.Random, *, speed: float, spread: float = 0.005) -> Outcome:
    """A probe whose run is off by about 0.5 %, and whose iterations differ by less than that."""
    step_time_s = 512 / (speed * layout.num_devices) * (1 + dice.gauss(0.0, spread))
    plain = make_measurement(layout).iterations
    iterations = tuple(
        replace(each, step_time_s=step_time_s * (1 + dice.gauss(0.0, 0.003))) for each in plain
    )
    return completed(layout, tokens_per_s=512 / step_time_s, iterations=iterations)


def judge_of(dice: random.Random, *, rivals: int = 2) -> Callable[[Layout], Outcome]:
    """A few layouts are as good as each other, the others far worse."""
    seen: list[Layout] = []

    def judge(layout: Layout) -> Outcome:
        if layout not in seen:
            seen.append(layout)
        return noisy(layout, dice, speed=1000.0 if seen.index(layout) < rivals else 500.0)

    return judge


def driven(store: Store, judge: Callable[[Layout], Outcome], **changes: Any) -> DrivenCampaign:
    """The campaign when it has ended."""
    campaign = DrivenCampaign(store, make_spec(**changes), judge)
    campaign.to_end()
    return campaign


def two_rounds_of_the_best(campaign: DrivenCampaign) -> None:
    """Both rivals were measured again, in turn, and nothing else was."""
    first, second, *_ = (trial.layout_key for trial in campaign.trials)
    assert [trial.layout_key for trial in campaign.repeats] == [first, second, first, second]
    assert [trial.repeat_reason for trial in campaign.repeats] == ["best", "best", "tie", "tie"]


@pytest.mark.parametrize("mortality", [0.0, 0.5])
def test_the_best_that_cannot_be_told_apart_are_measured_again_in_turn(
    store: Store, mortality: float
) -> None:
    spec = make_spec(budget={"trials": 16}, stop={"remeasure": 3})
    campaign = DrivenCampaign(store, spec, judge_of(random.Random(2)), mortality=mortality)
    record, trials = campaign.to_end(), campaign.trials
    assert (len(campaign.drivers) > 3) == (mortality > 0.0)
    two_rounds_of_the_best(campaign)
    assert len(trials) == 16, "repeats count for the budget"
    best, rival, *others = store.leaderboard.ranked_layouts(record.id, record.objective)
    assert {best.trial.id, rival.trial.id} == {trials[0].id, trials[1].id}
    assert (best.num_runs, rival.num_runs) == (3, 3)
    assert not any(other.tied_with_first for other in others)


@pytest.mark.parametrize(
    ("rivals", "most"), [(1, 3), (2, 0)], ids=["the winner stands alone", "the campaign says so"]
)
def test_nothing_is_measured_again_that_decides_nothing(
    store: Store, rivals: int, most: int
) -> None:
    judge = judge_of(random.Random(2), rivals=rivals)
    campaign = driven(store, judge, budget={"trials": 8}, stop={"remeasure": most})
    assert campaign.repeats == []
    assert len(campaign.trials) == 8, "the search has what was kept back"
    assert campaign.record.reason == "budget"


def test_the_best_of_an_exhausted_space_are_measured_again_beyond_it(store: Store) -> None:
    judge = judge_of(random.Random(2))
    changes = {"strategy": "exhaustive", "budget": {}, "space": FEW, "stop": {"remeasure": 2}}
    campaign = driven(store, judge, **changes)
    assert campaign.record.reason == "exhausted"
    assert len(campaign.trials) == campaign.record.num_legal_layouts + 4


def test_no_more_layouts_are_measured_again_than_the_campaign_allows(store: Store) -> None:
    judge = judge_of(random.Random(3), rivals=28)
    changes = {"strategy": "exhaustive", "budget": {}, "space": FEW, "stop": {"remeasure": 3}}
    again = [trial.layout_key for trial in driven(store, judge, **changes).repeats]
    assert len(again) >= 2
    assert len(again[:3]) == len(set(again[:3]))
    assert max(again.count(key) for key in again) == 2


@pytest.mark.parametrize("left_over", [0.0, 0.06])
def test_layouts_that_were_disturbed_are_repeated_before_a_winner_is_named(
    sqlite_url: str, left_over: float
) -> None:
    """A burst disturbed the first runs, that of the best layout most; others seemed to be faster.

    The budget is enough to repeat four. Later other load is gone, or nearly so.
    """
    seen: list[Layout] = []

    def judge(layout: Layout) -> Outcome:
        seen.append(layout)
        is_best, is_first = layout == seen[0], seen.count(layout) == 1
        share = left_over if not is_first else 0.5 if is_best else 0.2
        speed = 1000.0 if is_best else 800.0
        plain = completed(layout, tokens_per_s=speed * (1 - share) * layout.num_devices)
        return replace(plain, measurement=replace(plain.measurement, others_share=share))

    clock = TurnableClock()
    with closing(TimelyStore(sqlite_url, clock=clock)) as timely:
        campaign = DrivenCampaign(
            timely, make_spec(budget={"trials": 16}, stop={"remeasure": 3}), judge
        )

        def has_ended() -> bool:
            clock.forward(5)
            return campaign.record.ended_at is not None

        campaign.until(has_ended)
        first = campaign.repeats[0]
        assert (first.layout, first.repeat_reason) == (seen[0], "disturbed")
        winner = timely.leaderboard.winner(campaign.record.id, campaign.record.objective)
        assert winner.trial.layout == seen[0]
        assert winner.trial.id == first.id, "the run that was disturbed more no longer counts"
        assert winner.disturbed is (left_over > 0)


def test_a_driver_that_dies_between_two_repeats_of_a_round_makes_the_other_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeat_trial, calls = store.trials.repeat, []

    def dies_after_the_first(trial_id: int, *, reason: RepeatReason) -> TrialRecord:
        calls.append(trial_id)
        if len(calls) == 2:
            raise OSError("killed")
        return repeat_trial(trial_id, reason=reason)

    monkeypatch.setattr(store.trials, "repeat", dies_after_the_first)
    judge = judge_of(random.Random(2))
    two_rounds_of_the_best(driven(store, judge, budget={"trials": 16}, stop={"remeasure": 3}))


def test_what_was_stopped_early_is_measured_in_full_where_nothing_else_is_left(
    store: Store,
) -> None:
    def judge(layout: Layout) -> Outcome:
        seen.append(layout)
        short = len(seen) == 1
        changes = {"shortened": True, "iterations_asked": 10} if short else {}
        return completed(layout, tokens_per_s=900.0 * layout.num_devices, **changes)

    seen: list[Layout] = []
    space = {"global_batch_size": 16, "tp": 1, "pp": 1, "dp": 1}
    changes = {"space": space, "budget": {"trials": 9}, "stop": {"remeasure": 1}}
    record = driven(store, judge, **changes).record
    assert len(seen) == 2
    winner = store.leaderboard.winner(record.id, record.objective)
    assert not winner.shortened


@pytest.mark.parametrize(
    ("limits", "layouts", "most"),
    [({"trials": 16}, 3, 2), ({"trials": 60}, 3, 3), ({"node_hours": 2.0}, 3, 3), ({}, 0, 0)],
)
def test_doubt_gets_at_most_a_third_of_the_repeats(
    limits: dict[str, Any], layouts: int, most: int
) -> None:
    assert most_doubted(Budget.from_mapping(limits), layouts) == most


@pytest.mark.parametrize(
    ("limits", "spent", "kept"),
    [
        ({"trials": 60}, {"trials": 53}, False),
        ({"trials": 60}, {"trials": 54}, True),
        ({"trials": 12}, {"trials": 8}, False),
        ({"trials": 12}, {"trials": 9}, True),
        ({"trials": 6}, {"trials": 5}, False),
        ({"node_hours": 1.0}, {"trials": 53, "node_seconds": 3180.0}, False),
        ({"node_hours": 1.0}, {"trials": 54, "node_seconds": 3236.0}, False),
        ({"node_hours": 1.0}, {"trials": 54, "node_seconds": 3240.0}, True),
        ({"wall_time_s": 100.0}, {"trials": 10, "wall_time_s": 74.0}, False),
        ({"wall_time_s": 100.0}, {"trials": 10, "wall_time_s": 76.0}, True),
        ({}, {"trials": 1000}, False),
    ],
)
def test_a_part_of_the_budget_is_reserved_for_repeats(
    limits: dict[str, Any], spent: dict[str, Any], kept: bool
) -> None:
    budget = make_spec(budget=limits, strategy="exhaustive").budget
    so_far = Spent(**{"trials": 0, "node_seconds": 0.0, "wall_time_s": 0.0, **spent})
    assert is_reserved(budget, so_far, 6) is kept


class Expecting(FixedOrderProposer):
    """Holds less possible with every layout that completed: 30 %, 15 %, 10 %, ..."""

    def possible_improvement(self, history: History) -> float | None:
        num_told = sum(1 for _ in history.ranked(math.inf))
        return 0.3 / num_told if num_told else None


@pytest.fixture
def expecting(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(problem: SearchProblem, _seed: int) -> Proposer:
        return Expecting(range(len(problem.layouts)))

    monkeypatch.setitem(registry.STRATEGIES, "random", make)  # type: ignore[arg-type]


@pytest.mark.usefixtures("expecting")
def test_a_campaign_whose_rest_promises_too_little_measures_its_best_again_and_ends(
    store: Store,
) -> None:
    stop = {"converged_within": 0.025, "remeasure": 2}
    campaign = driven(store, judge_of(random.Random(2)), budget={"trials": 25}, stop=stop)
    record = campaign.record
    assert (record.state, record.reason) == ("COMPLETED", "converged")
    # After thirteen and fourteen too little was left (2.3 and 2.1 %); the next one waited already,
    # and is not wasted.
    assert record.message.startswith("what is left improves the best by more than 2.1")
    assert "less than the 0.025 of stop.converged_within" in record.message
    assert len(campaign.repeats) == 4
    assert 14 <= len(campaign.trials) - len(campaign.repeats) <= 16


@pytest.mark.usefixtures("expecting")
def test_a_campaign_is_never_called_converged_after_a_few_probes(store: Store) -> None:
    judge = judge_of(random.Random(2), rivals=1)
    stop = {"converged_within": 0.9, "remeasure": 0}
    campaign = driven(store, judge, budget={"trials": 25}, stop=stop)
    assert campaign.record.reason == "converged"
    assert 5 <= len(campaign.trials) <= 7


def test_a_campaign_whose_strategy_predicts_nothing_goes_on_to_its_budget(store: Store) -> None:
    stop = {"converged_within": 0.5, "remeasure": 0}
    campaign = driven(store, judge_of(random.Random(2)), budget={"trials": 7}, stop=stop)
    assert campaign.record.reason == "budget"


def test_guided_ends_a_campaign_by_itself_long_before_everything_was_tried(store: Store) -> None:
    spec = make_spec(strategy="guided")

    def judge(layout: Layout) -> Outcome:
        seconds = float(step_time_s(layout, spec.model, spec.cluster)[0]) * (1 + 0.1 * layout.pp)
        peaks = {"peak_memory_bytes": 1 << 27, "peak_memory_bytes_by_stage": (1 << 27,) * layout.pp}
        return completed(layout, step_time_s=seconds, **peaks)

    stop = {"converged_within": 0.05, "remeasure": 0}
    campaign = driven(store, judge, strategy="guided", budget={"trials": 28}, stop=stop)
    record = campaign.record
    assert record.reason == "converged"
    assert len(campaign.trials) < 20
    legal = spec.legal_set()
    best = max(
        judge(legal.layout(i)).measurement.tokens_per_s_per_device for i in range(len(legal))
    )
    winner = store.leaderboard.winner(record.id, record.objective)
    assert winner.value >= 0.95 * best


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


def trained(layout: Layout, *, is_off: bool) -> Outcome:
    """The odd ones are faster than all others."""
    speed = 9000.0 if is_off else 1000.0 / (layout.tp + layout.pp)
    return completed(layout, loss_off=0.3 * is_off, tokens_per_s=speed * layout.num_devices)


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


def test_two_layouts_that_contradict_each_other_are_both_measured_again(store: Store) -> None:
    spec = make_spec(
        strategy="exhaustive",
        space={"global_batch_size": 16, "tp": [1, 2], "pp": 1, "dp": 1},
        budget={"trials": 9},
    )
    assert len(spec.legal_set()) == 2
    odd = spec.legal_set().layout(0)
    campaign = DrivenCampaign(store, spec, lambda layout: trained(layout, is_off=layout == odd))
    campaign.to_end()
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

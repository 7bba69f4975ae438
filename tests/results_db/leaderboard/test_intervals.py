"""Repeats count together, intervals say how sure, and what was stopped early never wins."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from results_db.leaderboard.leaderboard_query import LeaderboardQuery
from results_db.records import WorkerRecord
from results_db.store import Store
from search_spaces.protocol.outcome import Iteration
from search_spaces.spec.layout import Layout
from search_spaces.statistics.pooling import PooledRuns, Spread, spread_of_squares, squares_of_runs
from tests.kit.store import completed, lease_one, make_campaign, make_worker

pytestmark = pytest.mark.sqlite_is_enough

Measure = Callable[..., int]


@pytest.fixture
def measure(store: Store) -> Measure:
    """Runs one trial of a layout in the first campaign, again where it was run before."""
    campaign, worker = make_campaign(store), make_worker(store)
    return lambda layout, **changes: _measure(store, campaign, worker, layout, **changes)


def _measure(
    store: Store,
    campaign: int,
    worker: WorkerRecord,
    layout: Layout,
    *,
    step_time_s: float,
    noise: float = 0.01,
    timed: int = 5,
    **changes: Any,
) -> int:
    before = [trial.id for trial in store.trials.find(campaign) if trial.layout == layout]
    trial = store.trials.repeat(before[0]) if before else store.trials.add(campaign, layout)
    lease = lease_one(store, worker.id)
    times = [step_time_s * (1 + noise * (place - timed // 2)) for place in range(timed)]
    iterations = tuple(
        Iteration(
            index=index,
            kind="warmup" if index < 2 else "timed",
            step_time_s=times[max(index - 2, 0)],
            loss=6.0 - index / 10,
            grad_norm=1.5,
        )
        for index in range(2 + timed)
    )
    outcome = completed(layout, tokens_per_s=128 / step_time_s, iterations=iterations, **changes)
    store.outcomes.post(trial.id, lease.attempt, outcome)
    return trial.id


A, B, C, D = (Layout(tp=tp) for tp in (1, 2, 4, 8))


def standings(store: Store, **page: Any) -> Any:
    return store.leaderboard.ranked_layouts(
        store.campaigns.by_name("first").id, "tokens_per_s", **page
    )


def test_repeats_of_a_layout_share_one_place_by_their_median(
    store: Store, measure: Measure
) -> None:
    first = measure(A, step_time_s=0.50)
    other = measure(B, step_time_s=0.55)
    again = [measure(A, step_time_s=seconds) for seconds in (0.60, 0.62)]
    best, second = standings(store)
    assert (best.trial.id, second.trial.id) == (other, first)
    assert second.trial_ids == (first, *again)
    assert second.num_runs == 3
    assert second.value == pytest.approx(128 / 0.60)
    assert second.step_time_s == 0.60
    assert store.leaderboard.ranked_summary(store.campaigns.by_name("first").id).num_ranked == 2


def test_a_share_below_the_best_is_a_share_of_the_best(store: Store, measure: Measure) -> None:
    for layout, of_best in ((A, 1.0), (B, 0.905), (C, 0.895)):
        measure(layout, step_time_s=0.5 / of_best)
    within = standings(store, listing=LeaderboardQuery(within_percent=10.0))
    assert {ranked.trial.layout for ranked in within} == {A, B}


def test_an_interval_is_that_of_students_t_over_the_iterations(
    store: Store, measure: Measure
) -> None:
    measure(A, step_time_s=0.5, noise=0.01)
    (best,) = standings(store)
    # sd of five logs 1 % apart: 1.58 %; the median's error is sqrt(pi/2) times the mean's.
    half = 2.776 * math.sqrt(math.pi / 2 / 5) * 0.01582
    assert math.log(best.high / best.value) == pytest.approx(half, rel=0.01)
    assert best.value / best.low == pytest.approx(best.high / best.value)
    assert best.step_time_low_s < 0.5 < best.step_time_high_s


def test_runs_that_lie_further_apart_than_their_iterations_widen_every_interval(
    store: Store, measure: Measure
) -> None:
    measure(A, step_time_s=0.50, noise=0.001)
    measure(B, step_time_s=0.51, noise=0.001)
    assert [each.is_tied for each in standings(store)] == [True, False]
    measure(A, step_time_s=0.53, noise=0.001)
    measure(B, step_time_s=0.515, noise=0.001)
    after = standings(store)
    assert [each.is_tied for each in after] == [True, True]
    assert all(each.high / each.value > 1.02 for each in after)


def test_a_single_iteration_has_no_interval(store: Store, measure: Measure) -> None:
    measure(A, step_time_s=0.5, timed=1)
    measure(B, step_time_s=0.6, timed=1)
    best, second = standings(store)
    assert (best.low, best.high, second.low) == (None, None, None)
    assert (best.is_tied, second.is_tied) == (True, False)


def test_each_page_compares_with_the_first_of_all(store: Store, measure: Measure) -> None:
    measure(A, step_time_s=0.50)
    measure(B, step_time_s=0.501)
    measure(C, step_time_s=0.80)
    assert [each.is_tied for each in standings(store)] == [True, True, False]
    assert [each.is_tied for each in standings(store, limit=2, offset=1)] == [True, False]


def test_what_was_stopped_early_is_ranked_and_never_wins(store: Store, measure: Measure) -> None:
    short = {"shortened": True, "iterations_asked": 10, "timed": 3}
    campaign = store.campaigns.by_name("first").id
    quick = measure(A, step_time_s=0.4, **short)
    assert store.leaderboard.winner(campaign, "tokens_per_s") is None
    slow = measure(B, step_time_s=0.6)
    middle = measure(C, step_time_s=0.5, **short)
    found = standings(store)
    assert [each.trial.id for each in found] == [slow, quick, middle]
    assert [each.shortened for each in found] == [False, True, True]
    winner = store.leaderboard.winner(campaign, "tokens_per_s")
    assert winner is not None
    assert winner.trial.id == slow


def test_a_full_run_takes_the_place_of_a_shortened_one(store: Store, measure: Measure) -> None:
    measure(A, step_time_s=0.4, shortened=True, iterations_asked=10, timed=3)
    full = measure(A, step_time_s=0.45)
    (best,) = standings(store)
    assert (best.trial_ids, best.shortened) == ((full,), False)


def test_the_front_knows_a_layout_by_the_same_run_as_the_ranking(
    store: Store, measure: Measure
) -> None:
    short = {"shortened": True, "iterations_asked": 10, "timed": 3}
    measure(A, step_time_s=0.4, **short)
    full = measure(A, step_time_s=0.45)
    measure(B, step_time_s=0.3, **short)
    campaign = store.campaigns.by_name("first")
    assert store.leaderboard.front(campaign.id) == {full}
    assert [each.trial.id for each in standings(store, listing=LeaderboardQuery(front=True))] == [
        full
    ]


def test_the_front_of_one_objective_is_the_first_of_the_ranking_though_means_of_rates_differ(
    store: Store, measure: Measure
) -> None:
    measure(A, step_time_s=1.0)
    measure(A, step_time_s=1.2)
    best = measure(Layout(micro_batch_size=2), step_time_s=1.095)
    # A's rates have the larger mean, its step time of 1.1 s is the longer one.
    assert standings(store)[0].trial.id == best
    assert store.leaderboard.front(store.campaigns.by_name("first").id) == {best}


def test_a_front_of_runs_that_were_all_stopped_early_has_the_best_of_them(
    store: Store, measure: Measure
) -> None:
    short = {"shortened": True, "iterations_asked": 10, "timed": 3}
    quick = measure(A, step_time_s=0.4, **short)
    measure(B, step_time_s=0.5, **short)
    assert store.leaderboard.front(store.campaigns.by_name("first").id) == {quick}


def test_a_shortened_measurement_keeps_how_many_iterations_were_asked_for(
    store: Store, measure: Measure
) -> None:
    trial_id = measure(A, step_time_s=0.4, shortened=True, iterations_asked=10, timed=3)
    kept = store.trials.get(trial_id).measurement
    assert kept is not None
    assert (kept.shortened, kept.iterations_asked) == (True, 10)


def test_equal_layouts_stand_in_the_order_in_which_they_were_measured(
    store: Store, measure: Measure
) -> None:
    ids = [measure(layout, step_time_s=0.5) for layout in (C, A, B)]
    assert [each.trial.id for each in standings(store)] == ids


def spread_of_runs(layouts: list[list[float]]) -> Spread | None:
    return spread_of_squares((squares_of_runs(runs), len(runs)) for runs in layouts)


def test_the_spread_of_runs_allows_each_layout_a_step_time_of_its_own() -> None:
    spread = spread_of_runs([[1.0, math.exp(0.02)], [5.0, 5.0 * math.exp(0.02)], [9.0]])
    assert spread is not None
    assert spread.dof == 2
    assert spread.log_variance == pytest.approx(0.0002)
    assert spread_of_runs([[1.0], [2.0]]) is None


def test_an_interval_over_runs_holds_the_truth_though_each_run_is_off() -> None:
    dice = random.Random(3)

    def run() -> list[float]:
        off = dice.gauss(0.0, 0.02)
        return [math.exp(off + dice.gauss(0.0, 0.005)) for _ in range(10)]

    held = alone = 0
    for _ in range(400):
        layouts = [[run() for _ in range(3)] for _ in range(3)]
        spread = spread_of_runs([[sorted(r)[5] for r in runs] for runs in layouts])
        pooled, single = (
            PooledRuns.of(layouts[0]).estimate(spread),
            PooledRuns.of(layouts[0][:1]).estimate(None),
        )
        assert pooled is not None
        assert single is not None
        held += abs(pooled.log_s) <= math.log(pooled.factor)
        alone += abs(single.log_s) <= math.log(single.factor)
    assert held / 400 > 0.93
    assert alone / 400 < 0.5, "iterations alone promise too much"


def test_more_runs_are_surer() -> None:
    run = [0.50, 0.51, 0.49, 0.50, 0.52]
    spread = Spread(log_variance=4e-4, dof=4)
    one, two = (PooledRuns.of([run] * num).estimate(spread) for num in (1, 2))
    assert one is not None
    assert two is not None
    assert two.error == pytest.approx(one.error / math.sqrt(2))
    assert replace(one, error=two.error).factor == two.factor

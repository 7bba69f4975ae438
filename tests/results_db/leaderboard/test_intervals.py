"""Repeats count together, intervals say how sure, and what was stopped early never wins."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest

from results_db.leaderboard.leaderboard_listing import LeaderboardListing
from results_db.store import Store
from search_spaces.spec.layout import Layout
from search_spaces.statistics.pooling import PooledRuns, Spread, spread_of_squares, squares_of_runs
from tests.kit.store import front, make_iterations, make_spec, run_trial

pytestmark = pytest.mark.sqlite_is_enough

SHORT = {"shortened": True, "iterations_asked": 10, "timed": 3}
"""Changes of a measurement that was stopped early."""


@pytest.fixture
def campaign(store: Store) -> int:
    return store.campaigns.create(make_spec(objective="tokens_per_s"), num_legal_layouts=9).id


def measure(
    store: Store,
    campaign: int,
    layout: Layout,
    step_time_s: float,
    *,
    noise: float = 0.01,
    timed: int = 5,
    **changes: Any,
) -> int:
    """Runs a trial whose iterations differ by `noise`, with the step time in the middle."""
    times = [step_time_s * (1 + noise * (place - timed // 2)) for place in range(timed)]
    iterations = tuple(
        replace(each, step_time_s=times[max(each.index - 2, 0)])
        for each in make_iterations(step_time_s, timed=timed)
    )
    rate = 128 / step_time_s
    return run_trial(store, campaign, layout, tokens_per_s=rate, iterations=iterations, **changes)


A, B, C = (Layout(tp=tp) for tp in (1, 2, 4))


def standings(store: Store, **page: Any) -> Any:
    return store.leaderboard.ranked_layouts(1, "tokens_per_s", **page)


@pytest.mark.parametrize(
    ("runs", "ranked", "on_front"),
    [
        # Repeats share one place by their median.
        ([(A, 0.50, {}), (B, 0.55, {}), (A, 0.60, {}), (A, 0.62, {})], [B, A], {B}),
        # What was stopped early is ranked, and wins only while nothing else is there.
        ([(A, 0.4, SHORT), (B, 0.6, {}), (C, 0.5, SHORT)], [B, A, C], {B}),
        ([(A, 0.4, SHORT), (B, 0.5, SHORT)], [A, B], {A}),
        # A full run takes the place of a shortened one, in the ranking and on the front.
        ([(A, 0.4, SHORT), (A, 0.45, {}), (B, 0.3, SHORT)], [A, B], {A}),
        # The rates of A have the larger mean, its median step time is the longer one.
        ([(A, 1.0, {}), (A, 1.2, {}), (B, 1.095, {})], [B, A], {B}),
        # Equal layouts stand in the order in which they were measured.
        ([(C, 0.5, {}), (A, 0.5, {}), (B, 0.5, {})], [C, A, B], {A, B, C}),
    ],
)
def test_layouts_are_ranked_by_all_of_their_runs_that_count(
    store: Store,
    campaign: int,
    runs: list[tuple[Layout, float, dict[str, Any]]],
    ranked: list[Layout],
    on_front: set[Layout],
) -> None:
    for layout, step_time_s, changes in runs:
        measure(store, campaign, layout, step_time_s, **changes)
    found = standings(store)
    assert [each.trial.layout for each in found] == ranked
    assert {store.trials.get(id_).layout for id_ in front(store, campaign)} == on_front
    in_full = {layout for layout, _, changes in runs if not changes}
    assert {each.trial.layout for each in found if not each.shortened} == in_full
    for each in found:
        ids = [t.id for t in store.trials.find(campaign) if t.layout == each.trial.layout]
        counting = [id_ for id_ in ids if not shortened(store, id_)] or ids
        assert (list(each.trial_ids), each.num_runs) == (counting, len(counting))
    winner = store.leaderboard.winner(campaign, "tokens_per_s")
    assert winner == (found[0] if in_full else None)


def shortened(store: Store, trial_id: int) -> bool:
    measured = store.trials.get(trial_id).measurement
    return measured is not None and measured.shortened


def test_a_share_below_the_best_is_a_share_of_the_best(store: Store, campaign: int) -> None:
    for layout, of_best in ((A, 1.0), (B, 0.905), (C, 0.895)):
        measure(store, campaign, layout, 0.5 / of_best)
    within = standings(store, listing=LeaderboardListing(within_percent=10.0))
    assert {ranked.trial.layout for ranked in within} == {A, B}


def test_an_interval_is_that_of_students_t_over_the_iterations(store: Store, campaign: int) -> None:
    measure(store, campaign, A, 0.5)
    (best,) = standings(store)
    # sd of five logs 1 % apart: 1.58 %; the median's error is sqrt(pi/2) times the mean's.
    half = 2.776 * math.sqrt(math.pi / 2 / 5) * 0.01582
    assert math.log(best.high / best.value) == pytest.approx(half, rel=0.01)
    assert best.value / best.low == pytest.approx(best.high / best.value)
    assert best.step_time_low_s < 0.5 < best.step_time_high_s


def test_runs_that_lie_further_apart_than_their_iterations_widen_every_interval(
    store: Store, campaign: int
) -> None:
    for layout, step_time_s in ((A, 0.50), (B, 0.51)):
        measure(store, campaign, layout, step_time_s, noise=0.001)
    assert [each.is_tied for each in standings(store)] == [True, False]
    for layout, step_time_s in ((A, 0.53), (B, 0.515)):
        measure(store, campaign, layout, step_time_s, noise=0.001)
    after = standings(store)
    assert [each.is_tied for each in after] == [True, True]
    assert all(each.high / each.value > 1.02 for each in after)


def test_a_single_iteration_has_no_interval(store: Store, campaign: int) -> None:
    measure(store, campaign, A, 0.5, timed=1)
    measure(store, campaign, B, 0.6, timed=1)
    best, second = standings(store)
    assert (best.low, best.high, second.low) == (None, None, None)
    assert (best.is_tied, second.is_tied) == (True, False)


def test_each_page_compares_with_the_first_of_all(store: Store, campaign: int) -> None:
    for layout, step_time_s in ((A, 0.50), (B, 0.501), (C, 0.80)):
        measure(store, campaign, layout, step_time_s)
    assert [each.is_tied for each in standings(store)] == [True, True, False]
    assert [each.is_tied for each in standings(store, limit=2, offset=1)] == [True, False]


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

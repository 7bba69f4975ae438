"""Repeats count together, intervals say how sure, and what was stopped early never wins."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from results_db.store import Store
from results_db.trials.filter import LeaderboardListing
from search_spaces.spec.layout import Layout
from tests.kit.store import front, make_iterations, make_spec, make_worker, run_trial

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


def standings(store: Store) -> Any:
    return store.leaderboard.ranked_layouts(1, "tokens_per_s")


@pytest.mark.parametrize(
    ("runs", "ranked", "on_front"),
    [
        ([(A, 0.50, {}), (B, 0.55, {}), (A, 0.60, {}), (A, 0.62, {})], [B, A], {B}),
        ([(A, 0.4, SHORT), (B, 0.6, {}), (C, 0.5, SHORT)], [B, A, C], {B}),
        ([(A, 0.4, SHORT), (B, 0.5, SHORT)], [A, B], {A}),
        ([(A, 0.4, SHORT), (A, 0.45, {}), (B, 0.3, SHORT)], [A, B], {A}),
        ([(A, 1.0, {}), (A, 1.2, {}), (B, 1.095, {})], [B, A], {B}),
        ([(C, 0.5, {}), (A, 0.5, {}), (B, 0.5, {})], [C, A, B], {A, B, C}),
    ],
    ids=[
        *("repeats share a place by their median", "stopped early, so no winner"),
        *("all were stopped early", "a full run takes the place of a shortened one"),
        *("the larger mean of rates, the longer median time", "equal: the first one measured"),
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
        counting = [of for layout, _, of in runs if layout == each.trial.layout]
        assert each.num_runs == counting.count({}) or len(counting)
    winner = store.leaderboard.winner(campaign, "tokens_per_s")
    assert winner == (found[0] if in_full else None)


def test_a_share_below_the_best_is_a_share_of_the_best(store: Store, campaign: int) -> None:
    for layout, of_best in ((A, 1.0), (B, 0.905), (C, 0.895)):
        measure(store, campaign, layout, 0.5 / of_best)
    within = store.leaderboard.ranked_layouts(1, listing=LeaderboardListing(within_percent=10.0))
    assert {ranked.trial.layout for ranked in within} == {A, B}


def test_iterations_that_lie_far_apart_make_the_interval(store: Store, campaign: int) -> None:
    measure(store, campaign, A, 0.5, noise=0.1)
    (best,) = standings(store)
    # sd of five logs 10 % apart: 16 %; the median's error is sqrt(pi/2) times the mean's.
    half = 2.776 * math.sqrt(math.pi / 2 / 5) * 0.1603
    assert math.log(best.high / best.value) == pytest.approx(half, rel=0.01)
    assert best.value / best.low == pytest.approx(best.high / best.value)
    assert best.step_time_low_s < 0.5 < best.step_time_high_s


def test_layouts_close_together_are_tied_until_repeats_agree(store: Store, campaign: int) -> None:
    for layout, step_time_s in ((A, 0.50), (B, 0.52), (C, 0.80)):
        measure(store, campaign, layout, step_time_s, noise=0.001, timed=1)
    before = standings(store)
    assert [each.is_tied for each in before] == [True, True, False]
    assert before[0].high / before[0].value > 1.1, "a run of a single iteration has one, too"
    for layout, step_time_s in ((A, 0.50), (B, 0.52)) * 3:
        measure(store, campaign, layout, step_time_s, noise=0.001, timed=1)
    best, second, third = standings(store)
    assert [each.is_tied for each in (best, second, third)] == [True, False, False]
    assert third.high / third.value < 1.04, "it ran once"


def test_repeats_of_earlier_campaigns_on_the_cluster_narrow_intervals(store: Store) -> None:
    workers = {c: make_worker(store, c, cluster=c).id for c in ("same", "other", "third")}

    def create(name: str, cluster: str) -> int:
        spec = make_spec(objective="tokens_per_s", name=name)
        spec["cluster"] = {**spec["cluster"], "name": cluster}
        return store.campaigns.create(spec, num_legal_layouts=9).id

    for name, cluster in (("there", "other"), ("earlier", "same")):
        first = create(name, cluster)
        for layout in (A, B, C) * 4:
            measure(store, first, layout, 0.5, noise=0.001, worker=workers[cluster])
        store.campaigns.end(first, "COMPLETED", "budget", "the budget is spent")
    widths = {}
    for name, cluster in (("new", "same"), ("elsewhere", "third")):
        new = create(name, cluster)
        measure(store, new, A, 0.7, noise=0.001, worker=workers[cluster])
        (row,) = store.leaderboard.ranked_layouts(new, "tokens_per_s")
        widths[name] = math.log(row.high / row.low)
    assert widths["new"] < widths["elsewhere"] / 4


def test_an_interval_ends_at_the_peak_of_the_devices(store: Store, campaign: int) -> None:
    measure(store, campaign, A, 0.5, hfu=0.95, mfu=0.95)
    (best,) = standings(store)
    assert best.high == pytest.approx(best.value / 0.95)
    assert best.low < best.value / 1.1

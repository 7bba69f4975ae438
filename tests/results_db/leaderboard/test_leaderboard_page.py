"""What counts on the leaderboard and how sure it is, what its pages say, and when they change."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import delete

from layout_tuner.results_db.errors import CampaignNotFoundError
from layout_tuner.results_db.leaderboard.leaderboard_memo import MAX_LAYOUTS, LeaderboardMemo
from layout_tuner.results_db.leaderboard.leaderboard_records import KnobCell
from layout_tuner.results_db.leaderboard.rank_layouts import Leaderboard
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.results_db.store import Store
from layout_tuner.results_db.trials.filter import LeaderboardListing, TrialFilter
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.store import (
    failed,
    front,
    make_campaign,
    make_iterations,
    make_spec,
    make_worker,
    ranked_trials,
    run_trial,
)

pytestmark = pytest.mark.sqlite_is_enough


def test_a_kept_leaderboard_goes_when_a_trial_of_it_ends(store: Store, campaign: int) -> None:
    other = make_campaign(store, "second")
    assert store.leaderboard.ranked_layouts(other) == []
    run_trial(store, campaign, tokens_per_s=1000.0)
    before = store.leaderboard.ranked_layouts(campaign)
    run_trial(store, other, tokens_per_s=10.0)
    assert len(store.leaderboard.ranked_layouts(other)) == 1
    assert store.leaderboard.ranked_layouts(campaign) == before
    run_trial(store, campaign, tokens_per_s=500.0)
    (pooled,) = store.leaderboard.ranked_layouts(campaign)
    assert pooled.num_runs == 2
    with store._db.write() as session:
        session.execute(delete(Campaign).where(Campaign.id == campaign))
    assert store.leaderboard.ranked_layouts(campaign) == []
    with pytest.raises(CampaignNotFoundError):
        store.leaderboard.page_of_layouts(campaign, limit=2)


def test_a_repeated_layout_is_on_the_front_at_its_median(store: Store) -> None:
    campaign = make_campaign(store, objective=["tokens_per_s", "memory_headroom"])
    for tokens_per_s in (1000.0, 250.0):  # 400 at the median
        run_trial(store, campaign, tokens_per_s=tokens_per_s)
    steady = run_trial(store, campaign, Layout(num_microbatches=2), tokens_per_s=600.0)
    assert front(store, campaign) == {steady}


def test_the_mfu_of_all_rows_is_by_one_peak(store: Store, campaign: int) -> None:
    """Each worker measures the peak of its devices; other load lowers what it measures."""
    trials = [
        run_trial(
            *(store, campaign, Layout(num_microbatches=number)),
            tokens_per_s=1e5,
            peak_tflops_per_device=peak,
        )
        for number, peak in ((1, 2.0), (2, 4.0), (3, 3.0))
    ]
    own = [store.trials.get(trial).measurement.mfu for trial in trials]
    assert own[0] > own[2] > own[1]
    rows = store.leaderboard.ranked_layouts(campaign)
    assert [row.measurement.mfu for row in rows] == pytest.approx([own[1]] * 3)
    assert {row.measurement.peak_tflops_per_device for row in rows} == {4.0}
    listing = LeaderboardListing(wanted=TrialFilter(min_mfu=1.01 * own[1]))
    assert store.leaderboard.ranked_layouts(campaign, listing=listing) == []


def test_a_layout_is_found_by_its_figures_at_the_median_of_its_runs(
    store: Store, campaign: int
) -> None:
    for tokens_per_s in (1000.0, 2000.0, 2000.0):
        run_trial(store, campaign, tokens_per_s=tokens_per_s)
    wanted = TrialFilter(min_tokens_per_s=1500.0)
    (found,) = store.leaderboard.ranked_layouts(campaign, listing=LeaderboardListing(wanted=wanted))
    assert found.value == 2000.0


def test_leaderboards_that_were_not_read_for_longest_are_dropped() -> None:
    memo = LeaderboardMemo()
    large = Leaderboard(
        layouts=[None] * (MAX_LAYOUTS // 2),  # type: ignore[list-item]
        front={},
        num_constrained=0,
    )
    for campaign in (1, 2):
        memo.keep((campaign, "tokens_per_s"), 7, large)
    assert memo.get((1, "tokens_per_s"), 7) is large
    assert memo.get((1, "tokens_per_s"), 8) is None
    memo.keep((3, "tokens_per_s"), 7, large)
    kept = [memo.get((campaign, "tokens_per_s"), 7) is large for campaign in (1, 2, 3)]
    assert kept == [True, False, True]


@pytest.mark.sqlite_is_enough(False)
def test_cells_of_knobs_have_the_best_of_all_ranked_layouts(store: Store, campaign: int) -> None:
    assert store.leaderboard.knob_cells(campaign, "tp") == []
    for layout, tokens_per_s in (
        (Layout(tp=1), 100.0),
        (Layout(tp=1, sequence_parallel=False, pp=2), 300.0),
        (Layout(tp=2, sequence_parallel=True), 200.0),
    ):
        run_trial(store, campaign, layout, tokens_per_s=tokens_per_s)
    run_trial(store, campaign, Layout(tp=4), failed())
    assert sorted(store.leaderboard.knob_cells(campaign, "tp")) == [
        KnobCell((1,), 2, 150.0),
        KnobCell((2,), 1, 100.0),
    ]
    both = sorted(store.leaderboard.knob_cells(campaign, "tp", "sequence_parallel"))
    assert both == [KnobCell((1, False), 2, 150.0), KnobCell((2, True), 1, 100.0)]
    assert [type(cell.values[1]) for cell in both] == [bool, bool]


def test_the_median_leaves_out_layouts_that_were_stopped_early(store: Store, campaign: int) -> None:
    def summary() -> tuple[int, int, float | None]:
        found = store.leaderboard.ranked_summary(campaign)
        return found.num_ranked, found.num_shortened, found.median_complete

    assert summary() == (0, 0, None)
    for number, speed in enumerate((100.0, 300.0, 350.0), 1):
        run_trial(store, campaign, Layout(micro_batch_size=number), tokens_per_s=speed)
    run_trial(store, campaign, Layout(micro_batch_size=9), tokens_per_s=50.0, shortened=True)
    assert summary() == (4, 1, 300.0)


def constrained_campaign(store: Store, **changes: object) -> int:
    spec = make_spec() | changes
    spec["cluster"] |= {"device_memory_bytes": 1000}
    make_worker(store)
    return store.campaigns.create(spec, num_legal_layouts=100).id


def test_a_trial_that_breaks_a_constraint_is_kept_and_counted_and_not_ranked(store: Store) -> None:
    objective = ["tokens_per_s", "memory_headroom"]
    campaign = constrained_campaign(
        store, objective=objective, constraints={"memory_headroom": 0.1}
    )
    assert store.campaigns.get(campaign).max_peak_memory_bytes == 900
    tight = run_trial(store, campaign, Layout(), tokens_per_s=9000.0, peak_memory_bytes=901)
    just = run_trial(store, campaign, Layout(tp=2), tokens_per_s=10.0, peak_memory_bytes=900)
    assert [trial.id for trial in ranked_trials(store, campaign, "tokens_per_s")] == [just]
    assert counts(store, campaign) == (1, 1)
    assert front(store, campaign) == {just}
    kept = store.trials.get(tight)
    assert kept.state == "COMPLETED"
    assert kept.measurement.peak_memory_bytes == 901


@pytest.mark.parametrize(
    ("constraints", "changes", "expected"),
    [
        # What never counts is not counted as constrained.
        ({"memory_headroom": 0.1}, {"oversubscribed": True, "peak_memory_bytes": 999}, (0, 0)),
        ({"memory_headroom": 0.1}, {"outcome": failed()}, (0, 0)),
        # Without constraints a device may be full.
        ({}, {"peak_memory_bytes": 5 << 30}, (1, 0)),
    ],
)
def test_only_completed_measurements_are_counted_as_constrained(
    store: Store, constraints: dict[str, float], changes: dict[str, Any], expected: tuple[int, int]
) -> None:
    campaign = constrained_campaign(store, constraints=constraints)
    run_trial(store, campaign, **changes)
    assert counts(store, campaign) == expected


def counts(store: Store, campaign: int) -> tuple[int, int]:
    """The ranked layouts, and the trials that a constraint leaves out."""
    constrained = store.leaderboard.page_of_layouts(campaign, limit=0).constrained
    return store.leaderboard.ranked_summary(campaign).num_ranked, constrained


SHORT = {"shortened": True, "iterations_asked": 10, "timed": 3}
"""Changes of a measurement that was stopped early."""


@pytest.fixture
def by_rate(store: Store) -> int:
    return make_campaign(store, objective="tokens_per_s")


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
    by_rate: int,
    runs: list[tuple[Layout, float, dict[str, Any]]],
    ranked: list[Layout],
    on_front: set[Layout],
) -> None:
    for layout, step_time_s, changes in runs:
        measure(store, by_rate, layout, step_time_s, **changes)
    found = standings(store)
    assert [each.trial.layout for each in found] == ranked
    assert {store.trials.get(id_).layout for id_ in front(store, by_rate)} == on_front
    in_full = {layout for layout, _, changes in runs if not changes}
    assert {each.trial.layout for each in found if not each.shortened} == in_full
    for each in found:
        counting = [of for layout, _, of in runs if layout == each.trial.layout]
        assert each.num_runs == counting.count({}) or len(counting)
    winner = store.leaderboard.winner(by_rate, "tokens_per_s")
    assert winner == (found[0] if in_full else None)


def test_a_share_below_the_best_is_a_share_of_the_best(store: Store, by_rate: int) -> None:
    for layout, of_best in ((A, 1.0), (B, 0.905), (C, 0.895)):
        measure(store, by_rate, layout, 0.5 / of_best)
    within = store.leaderboard.ranked_layouts(1, listing=LeaderboardListing(within_percent=10.0))
    assert {ranked.trial.layout for ranked in within} == {A, B}


def test_iterations_that_lie_far_apart_make_the_interval(store: Store, by_rate: int) -> None:
    measure(store, by_rate, A, 0.5, noise=0.1)
    (best,) = standings(store)
    # sd of five logs 10 % apart: 16 %; the median's error is sqrt(pi/2) times the mean's.
    half = 2.776 * math.sqrt(math.pi / 2 / 5) * 0.1603
    assert math.log(best.value_high / best.value) == pytest.approx(half, rel=0.01)
    assert best.value / best.value_low == pytest.approx(best.value_high / best.value)
    assert best.step_time_low_s < 0.5 < best.step_time_high_s


def test_layouts_close_together_are_tied_until_repeats_agree(store: Store, by_rate: int) -> None:
    for layout, step_time_s in ((A, 0.50), (B, 0.52), (C, 0.80)):
        measure(store, by_rate, layout, step_time_s, noise=0.001, timed=1)
    before = standings(store)
    assert [each.tied_with_first for each in before] == [True, True, False]
    assert before[0].value_high / before[0].value > 1.1, "a run of a single iteration has one, too"
    for layout, step_time_s in ((A, 0.50), (B, 0.52)) * 3:
        measure(store, by_rate, layout, step_time_s, noise=0.001, timed=1)
    best, second, third = standings(store)
    assert [each.tied_with_first for each in (best, second, third)] == [True, False, False]
    assert third.value_high / third.value < 1.04, "it ran once"


def test_repeats_of_earlier_campaigns_on_the_cluster_narrow_intervals(store: Store) -> None:
    workers = {c: make_worker(store, c, cluster=c).id for c in ("same", "other", "third")}

    for name, cluster in (("there", "other"), ("earlier", "same")):
        first = make_campaign(store, name, cluster=cluster, objective="tokens_per_s")
        for layout in (A, B, C) * 4:
            measure(store, first, layout, 0.5, noise=0.001, worker=workers[cluster])
        store.campaigns.end(first, "COMPLETED", "budget", "the budget is spent")
    widths = {}
    for name, cluster in (("new", "same"), ("elsewhere", "third")):
        new = make_campaign(store, name, cluster=cluster, objective="tokens_per_s")
        measure(store, new, A, 0.7, noise=0.001, worker=workers[cluster])
        (row,) = store.leaderboard.ranked_layouts(new, "tokens_per_s")
        widths[name] = math.log(row.value_high / row.value_low)
    assert widths["new"] < widths["elsewhere"] / 4


def test_an_interval_ends_at_the_peak_of_the_devices(store: Store, by_rate: int) -> None:
    measure(store, by_rate, A, 0.5, hfu=0.95, mfu=0.95)
    (best,) = standings(store)
    assert best.value_high == pytest.approx(best.value / 0.95)
    assert best.value_low < best.value / 1.1

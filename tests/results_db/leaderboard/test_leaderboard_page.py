"""What counts on the leaderboard, what its pages say besides, and when they change."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import delete

from results_db.errors import CampaignNotFoundError
from results_db.leaderboard.leaderboard_memo import MAX_LAYOUTS, LeaderboardMemo
from results_db.leaderboard.leaderboard_records import KnobCell
from results_db.leaderboard.rank_layouts import Leaderboard
from results_db.models.tables import Campaign
from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.store import (
    failed,
    front,
    make_campaign,
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

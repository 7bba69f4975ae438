"""Pages of the leaderboard, and when they change."""

from __future__ import annotations

import pytest

from results_db.errors import CampaignNotFoundError
from results_db.leaderboard.knob_counts import KnobCell
from results_db.leaderboard.leaderboard_listing import LeaderboardListing
from results_db.leaderboard.leaderboard_memo import MAX_LAYOUTS, LeaderboardMemo
from results_db.leaderboard.rank_layouts import Leaderboard
from results_db.store import Store
from results_db.trials.filter import TrialFilter
from search_spaces.spec.layout import Layout
from tests.kit.store import failed, make_spec, run_trial

LAYOUTS = [
    Layout(pp=pp, num_microbatches=8, micro_batch_size=size) for pp in (1, 2) for size in (1, 2)
]


@pytest.fixture
def measured(store: Store) -> Store:
    """Four layouts of one stage and of two, the first of which was measured three times."""
    spec = make_spec(objective=["tokens_per_s", "tokens_per_node_hour"])
    store.campaigns.create(spec, num_legal_layouts=9)
    for speed, layout in enumerate(LAYOUTS):
        run_trial(store, 1, layout, tokens_per_s=1000.0 + speed)
    for speed in (1002.0, 1050.0):
        run_trial(store, 1, LAYOUTS[0], tokens_per_s=speed)
    return store


@pytest.mark.parametrize(
    ("listing", "total", "trials"),
    [
        (LeaderboardListing(sort="tokens_per_s", descending=True), 4, [4, 3]),
        (LeaderboardListing(wanted=TrialFilter(pp=(2,))), 2, [4, 3]),
        (LeaderboardListing(wanted=TrialFilter(pp=(1,)), sort="micro_batch_size"), 2, [1, 2]),
    ],
)
def test_a_page_has_the_first_of_the_list_and_the_number_of_all(
    measured: Store, listing: LeaderboardListing, total: int, trials: list[int]
) -> None:
    page = measured.leaderboard.page_of_layouts(1, listing=listing, limit=2)
    assert (page.total, page.constrained, page.source) == (total, 0, None)
    assert [each.trial.number for each in page.layouts] == trials
    assert set(page.front) == {4}
    assert page.layouts == measured.leaderboard.ranked_layouts(1, listing=listing, limit=2)


def test_a_campaign_that_is_not_there_has_no_page(measured: Store) -> None:
    with pytest.raises(CampaignNotFoundError, match="2"):
        measured.leaderboard.page_of_layouts(2, limit=2)


def test_a_page_shows_an_end_of_a_trial_at_once_and_its_own_campaign_alone(
    measured: Store,
) -> None:
    """Leaderboards are kept until a trial of their campaign ends."""
    other = measured.campaigns.create(make_spec("second"), num_legal_layouts=9).id
    assert measured.leaderboard.ranked_layouts(other) == []
    before = measured.leaderboard.ranked_layouts(1)
    run_trial(measured, other, LAYOUTS[0], tokens_per_s=10.0)
    assert len(measured.leaderboard.ranked_layouts(other)) == 1
    assert measured.leaderboard.ranked_layouts(1) == before
    run_trial(measured, 1, LAYOUTS[3], tokens_per_s=500.0)
    assert [
        each.num_runs for each in measured.leaderboard.ranked_layouts(1) if each.trial.number == 4
    ] == [2]
    assert measured.leaderboard.ranked_layouts(1) != before


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


def test_cells_of_knobs_have_the_best_of_all_ranked_layouts(store: Store, campaign: int) -> None:
    assert store.knobs.cells(campaign, "tp") == []
    for layout, tokens_per_s in (
        (Layout(tp=1), 100.0),
        (Layout(tp=1, sequence_parallel=False, pp=2), 300.0),
        (Layout(tp=2, sequence_parallel=True), 200.0),
    ):
        run_trial(store, campaign, layout, tokens_per_s=tokens_per_s)
    run_trial(store, campaign, Layout(tp=4), failed())
    assert sorted(store.knobs.cells(campaign, "tp")) == [
        KnobCell((1,), 2, 150.0),
        KnobCell((2,), 1, 100.0),
    ]
    both = sorted(store.knobs.cells(campaign, "tp", "sequence_parallel"))
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

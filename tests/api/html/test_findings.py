from __future__ import annotations

import dataclasses
import math

import pytest

from api.html.result_sentences import CampaignFinding, gain_over_median, ratio_interval
from results_db.leaderboard.leaderboard_records import RankedLayout, RankedSummary
from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.store import make_campaign


@pytest.fixture
def ranked(store: Store) -> RankedLayout:
    trial = store.trials.add(make_campaign(store), Layout())
    return RankedLayout(
        trial=trial,
        rank=1,
        value=300.0,
        low=300.0 / 1.1,
        high=300.0 * 1.1,
        step_time_s=1.0,
        step_time_low_s=0.9,
        step_time_high_s=1.1,
        trial_ids=(trial.id,),
        shortened=False,
        is_tied=True,
    )


def test_the_interval_of_a_ratio_combines_both_intervals(ranked: RankedLayout) -> None:
    half = dataclasses.replace(ranked, value=150.0, low=150.0 / 1.2, high=150.0 * 1.2)
    found = ratio_interval(ranked, half)
    reach = math.hypot(math.log(1.1), math.log(1.2))
    assert found == pytest.approx((2.0 / math.exp(reach), 2.0 * math.exp(reach)))
    # A value without error leaves the other's interval as it is.
    exact = dataclasses.replace(ranked, low=300.0, high=300.0)
    assert ratio_interval(ranked, exact) == pytest.approx((1 / 1.1, 1.1))
    # The lower end of a ratio has the upper end of its divisor.
    shrunk = dataclasses.replace(ranked, low=300.0 / 1.2, high=300.0)
    assert ratio_interval(exact, shrunk) == pytest.approx((1.0, 1.2))


def test_the_gain_names_the_layouts_that_it_leaves_out(ranked: RankedLayout, store: Store) -> None:
    campaign = store.campaigns.find()[0]

    def gain(ranked_layouts: int, shortened: int) -> str:
        summary = RankedSummary(
            num_ranked=ranked_layouts, num_shortened=shortened, median_complete=200.0
        )
        return gain_over_median(CampaignFinding(campaign=campaign, best=[ranked], summary=summary))

    assert gain(3, 0) == (
        "That is 1.50 times the median of the 3 layouts that were measured to the end. "
    )
    assert "7 more layouts were stopped early, since they were slower" in gain(10, 7)
    assert "times" not in gain(4, 2)  # two layouts have no median to speak of
    assert gain(2, 0) == ""

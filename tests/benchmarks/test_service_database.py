"""The database that pages are measured on: what it holds could have been measured."""

from __future__ import annotations

from contextlib import closing

import pytest

from benchmarks.service.service_database import KINDS, fill
from results_db.store import Store

TRIALS = 30


@pytest.mark.slow
def test_a_filled_database_is_one_that_campaigns_could_have_left(database_url: str) -> None:
    with closing(Store(database_url)) as store:
        fill(store, campaigns=KINDS + 4, trials=TRIALS)
        names = {f"campaign-{number}" for number in range(1, KINDS + 5)}
        assert {campaign.name for campaign in store.campaigns.find()} == names
        for campaign in store.campaigns.find():
            assert store.campaigns.count_trials(campaign.id)["COMPLETED"] == TRIALS
            repeats = [
                s.num_runs
                for s in store.leaderboard.ranked_layouts(campaign.id, campaign.objective)
            ]
            assert sorted(repeats) == [3] * 10
        first, second, again = (
            [s.value for s in store.leaderboard.ranked_layouts(id_, "tokens_per_s")]
            for id_ in (2, 3, 2 + KINDS)
        )
        assert first == again
        assert first != second

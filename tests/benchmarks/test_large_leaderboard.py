"""The benchmark of a large campaign in small: it runs, and its database is one that could be."""

from __future__ import annotations

from contextlib import closing

import pytest

from benchmarks.service import large_leaderboard
from benchmarks.service.large_leaderboard import _calls, fill_campaign
from results_db.admin.integrity import check_database
from results_db.store import Store


def test_a_filled_campaign_is_ranked_and_every_call_of_the_benchmark_answers(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_leaderboard, "_AT_ONCE", 30)
    with closing(Store(database_url)) as store:
        fill_campaign(store, 50)
        assert store.campaigns.count_trials(1) | {
            "COMPLETED": 50,
            "INFEASIBLE": 2,
        } == store.campaigns.count_trials(1)
        page = store.leaderboard.page_of_layouts(1, limit=1)
        assert page.total == 50
        for name, (_, call) in _calls(store, 50).items():
            assert call() is not None, name
    assert check_database(database_url).findings == ()

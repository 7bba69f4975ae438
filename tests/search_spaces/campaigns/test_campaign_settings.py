from __future__ import annotations

from typing import Any

import pytest

from search_spaces.campaigns.campaign_settings import Budget, changed_budget
from search_spaces.errors import CampaignInvalidError

BUDGET = {"trials": 10, "node_hours": None, "wall_time_s": 600.0}


@pytest.mark.parametrize(
    ("changes", "after"),
    [
        ({"trials": 40}, {"trials": 40, "node_hours": None, "wall_time_s": 600.0}),
        ({"wall_time": None}, {"trials": 10, "node_hours": None, "wall_time_s": None}),
        ({"wall_time_s": None}, {"trials": 10, "node_hours": None, "wall_time_s": None}),
        ({"wall_time": "1h"}, {"trials": 10, "node_hours": None, "wall_time_s": 3600.0}),
        ({"node_hours": 2}, {"trials": 10, "node_hours": 2, "wall_time_s": 600.0}),
        ({}, BUDGET),
    ],
)
def test_bounds_that_are_not_named_stay_and_null_takes_one_away(
    changes: dict[str, Any], after: dict[str, Any]
) -> None:
    assert changed_budget(BUDGET, changes, strategy="random") == after


@pytest.mark.parametrize(
    ("changes", "where", "says"),
    [
        ({"trials": 0}, "budget.trials", "0 is not a whole number"),
        ({"trials": True}, "budget.trials", "True"),
        ({"node_hours": float("nan")}, "budget.node_hours", "not a number from 1e-06 to"),
        ({"wall_time": "soon"}, "budget.wall_time", "not a duration"),
        ({"wall_time": "1h", "wall_time_s": 5}, "budget.wall_time", "not both"),
        ({"wall_time": None, "wall_time_s": 5}, "budget.wall_time", "not both"),
        ({"trails": 5}, "budget.trails", "did you mean 'trials'"),
        ({"trials": None, "wall_time_s": None}, "budget", "at least one bound"),
        ([], "budget", "not a mapping"),
    ],
    ids=str,
)
def test_a_wrong_bound_is_named(changes: Any, where: str, says: str) -> None:
    with pytest.raises(CampaignInvalidError, match=says) as caught:
        changed_budget(BUDGET, changes, strategy="random")
    assert caught.value.field == where


def test_an_exhaustive_campaign_may_lose_its_last_bound() -> None:
    assert Budget(**changed_budget({"trials": 3}, {"trials": None}, strategy="exhaustive")) == (
        Budget()
    )

"""Calls about the leaderboard."""

from __future__ import annotations

from typing import Any

from api.client.call import Call, get, get_bytes, get_text, segment
from api.client.route import route
from api.filter_query import filter_query
from api.schemas import LeaderboardPage
from results_db.trial_filter import TrialFilter


class LeaderboardCalls:
    """What can be asked about a campaign's leaderboard."""

    @route
    def leaderboard(
        self,
        campaign: str,
        *,
        objective: str | None = None,
        front: bool = False,
        within: float | None = None,
        wanted: TrialFilter | None = None,
        limit: int = 20,
        offset: int = 0,
    ) -> Call[LeaderboardPage]:
        """A page of the campaign's leaderboard.

        Args:
            campaign: its name or id.
            objective: what ranks; None: the campaign's own.
            front: only the Pareto front over the campaign's objectives.
            within: only layouts at most so many percent under the best, the cheapest first.
            wanted: what the layouts, and the measurements of their first trials, must be like.
            limit: most layouts of the page.
            offset: how many of those listed come before it.
        """
        query = _query(objective, front, within, wanted, limit, offset)
        return get(_path(campaign), LeaderboardPage, **query)

    @route
    def leaderboard_csv(
        self,
        campaign: str,
        *,
        objective: str | None = None,
        front: bool = False,
        within: float | None = None,
        wanted: TrialFilter | None = None,
        intervals: bool = False,
        limit: int = 20,
        offset: int = 0,
    ) -> Call[str]:
        """The same as a measurement table; with `intervals` also how sure each figure is."""
        query = _query(objective, front, within, wanted, limit, offset)
        return get_text(_path(campaign), **query, intervals=intervals or None, format="csv")

    @route
    def leaderboard_parquet(
        self,
        campaign: str,
        *,
        objective: str | None = None,
        front: bool = False,
        within: float | None = None,
        wanted: TrialFilter | None = None,
        intervals: bool = False,
        limit: int = 20,
        offset: int = 0,
    ) -> Call[bytes]:
        """The table as a Parquet file."""
        query = _query(objective, front, within, wanted, limit, offset)
        return get_bytes(_path(campaign), **query, intervals=intervals or None, format="parquet")


def _path(campaign: str) -> str:
    return f"/campaigns/{segment(campaign)}/leaderboard"


def _query(
    objective: str | None,
    front: bool,
    within: float | None,
    wanted: TrialFilter | None,
    limit: int,
    offset: int,
) -> dict[str, Any]:
    return {
        **({} if wanted is None else filter_query(wanted)),
        "objective": objective,
        "front": front or None,
        "within": within,
        "limit": limit,
        "offset": offset,
    }

"""Calls about the leaderboard."""

from __future__ import annotations

from api.client.call import Call, get, get_text, segment
from api.client.route import route
from api.schemas import LeaderboardPage


class LeaderboardCalls:
    """What can be asked about a campaign's leaderboard."""

    @route
    def leaderboard(
        self,
        campaign: str,
        *,
        objective: str | None = None,
        front: bool = False,
        limit: int = 20,
        offset: int = 0,
    ) -> Call[LeaderboardPage]:
        """A page of the campaign's leaderboard, or of its Pareto front."""
        return get(
            f"/campaigns/{segment(campaign)}/leaderboard",
            LeaderboardPage,
            objective=objective,
            front=front or None,
            limit=limit,
            offset=offset,
        )

    @route
    def leaderboard_csv(
        self,
        campaign: str,
        *,
        objective: str | None = None,
        front: bool = False,
        intervals: bool = False,
        limit: int = 20,
        offset: int = 0,
    ) -> Call[str]:
        """A page of the campaign's leaderboard, or of its Pareto front, as a measurement table."""
        return get_text(
            f"/campaigns/{segment(campaign)}/leaderboard",
            objective=objective,
            front=front or None,
            intervals=intervals or None,
            limit=limit,
            offset=offset,
            format="csv",
        )

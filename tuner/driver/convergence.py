"""When a campaign has converged: little is left to gain, and enough trials say so."""

from __future__ import annotations

from typing import Final

from tuner.driver.campaign_search import CampaignSearch

LEAST_COMPLETED: Final = 5
"""Completed trials before a campaign may be called converged: with fewer, the prediction of what is
left to gain comes mostly from the prior."""


def why_converged(search: CampaignSearch, num_completed: int) -> str | None:
    """Why a campaign with so many completed trials has converged; None: the search goes on."""
    share = search.spec.stop.converged_within
    if share is None or num_completed < LEAST_COMPLETED or not search.has_measured:
        return None
    possible = search.possible_improvement()
    if possible is None or possible >= share:
        return None
    what = "best" if len(search.spec.objectives) == 1 else "front's hypervolume"
    return (
        f"what is left improves the {what} by more than {possible:.2%} only with a probability "
        f"of 10 %, which is less than the {share:g} of stop.converged_within, after "
        f"{num_completed} completed trials"
    )

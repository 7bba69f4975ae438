"""When a campaign has converged: little is left to gain, and enough trials say so."""

from __future__ import annotations

from typing import Final

from results_db.store import Store
from tuner.driver.campaign_search import CampaignSearch

LEAST_COMPLETED: Final = 5
"""Completed trials before a campaign may be called converged: with fewer, the prediction of what is
left to gain comes mostly from the prior."""


def why_converged(store: Store, campaign_id: int, search: CampaignSearch) -> str | None:
    """Why a campaign has converged, as a message; None: the search goes on."""
    share = search.spec.stop.converged_within
    if share is None:
        return None
    num_completed = store.campaigns.count_trials(campaign_id)["COMPLETED"]
    if num_completed < LEAST_COMPLETED or not search.has_measured:
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

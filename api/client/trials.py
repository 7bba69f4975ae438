"""Calls about trials: listed by any knob and metric, read, measured again, cancelled."""

from __future__ import annotations

from api.client.call import PAGE, Call, Listing, get, segment
from api.client.route import route, walk
from api.schemas import TrialDetailRead, TrialPage, TrialRead


class TrialCalls:
    """What can be asked about trials."""

    @route
    def trial_page(
        self,
        campaign: str,
        *,
        state: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Call[TrialPage]:
        """A page of a campaign's trials in order of their numbers."""
        path = f"/campaigns/{segment(campaign)}/trials"
        return get(path, TrialPage, state=state, limit=limit, cursor=cursor)

    @walk
    def trials(self, campaign: str, *, state: str | None = None) -> Listing[TrialPage, TrialRead]:
        """A campaign's trials in order of their numbers."""
        path = f"/campaigns/{segment(campaign)}/trials"
        return Listing(
            page=lambda cursor: get(path, TrialPage, limit=PAGE, cursor=cursor, state=state),
            items=lambda page: page.trials,
        )

    @route
    def trial(self, trial_id: int) -> Call[TrialDetailRead]:
        """One trial with everything that is kept about it."""
        return get(f"/trials/{trial_id}", TrialDetailRead)

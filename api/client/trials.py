"""Calls about trials: listed by any knob and metric, read, measured again, cancelled."""

from __future__ import annotations

from typing import Any

from api.client.call import PAGE, Call, Listing, get, get_text, post, segment
from api.client.route import route, walk
from api.filter_query import filter_query
from api.schemas import (
    TrialDetailRead,
    TrialPage,
    TrialRead,
    TrialsAdded,
)
from results_db.records import TrialState
from results_db.trial_filter import TrialFilter
from results_db.trial_order import SortKey


class TrialCalls:
    """What can be asked about trials."""

    @route
    def trial_page(
        self,
        campaign: str,
        *,
        wanted: TrialFilter | None = None,
        sort: SortKey | None = None,
        descending: bool = False,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Call[TrialPage]:
        """A page of a campaign's trials.

        Args:
            campaign: its name or id.
            wanted: what they must be like; None: every one.
            sort: what to sort by; None: their numbers.
            descending: whether the most comes first.
            limit: most trials of the page; None: 100.
            cursor: `next_cursor` of the page before; None: the first page.
        """
        query = _query(wanted, sort, descending=descending)
        return _page(campaign, query, limit=limit, cursor=cursor)

    @walk
    def trials(
        self,
        campaign: str,
        *,
        state: TrialState | None = None,
        wanted: TrialFilter | None = None,
        sort: SortKey | None = None,
        descending: bool = False,
    ) -> Listing[TrialPage, TrialRead]:
        """A campaign's trials, page after page; each that was there at the first comes once.

        Args:
            campaign: its name or id.
            state: only these; in place of `wanted`.
            wanted: what they must be like; None: every one.
            sort: what to sort by; None: their numbers.
            descending: whether the most comes first.
        """
        if state is not None:
            wanted = TrialFilter(states=(state,))
        query = _query(wanted, sort, descending=descending)
        return Listing(
            page=lambda cursor: _page(campaign, query, limit=PAGE, cursor=cursor),
            items=lambda page: page.trials,
        )

    @route
    def trial(self, trial_id: int) -> Call[TrialDetailRead]:
        """One trial with everything that is kept about it."""
        return get(f"/trials/{trial_id}", TrialDetailRead)

    @route
    def trial_log(self, trial_id: int) -> Call[str]:
        """The last lines that a trial's ranks printed."""
        return get_text(f"/trials/{trial_id}/log")

    @route
    def repeat_trial(self, trial_id: int, *, times: int = 1) -> Call[TrialsAdded]:
        """Measures the layout of a COMPLETED trial again, so often."""
        return post(f"/trials/{trial_id}/repeat", TrialsAdded, {"times": times})

    @route
    def requeue_trial(self, trial_id: int) -> Call[TrialRead]:
        """Tries the layout of a FAILED, INFEASIBLE or CANCELLED trial once more."""
        return post(f"/trials/{trial_id}/requeue", TrialRead)

    @route
    def cancel_trial(self, trial_id: int) -> Call[TrialRead]:
        """Cancels a trial; one that runs is RUNNING until its worker has stopped it."""
        return post(f"/trials/{trial_id}/cancel", TrialRead)


def _query(wanted: TrialFilter | None, sort: SortKey | None, *, descending: bool) -> dict[str, Any]:
    stated = {} if wanted is None else filter_query(wanted)
    return {**stated, "sort": sort, "order": "desc" if descending else None}


def _page(
    campaign: str, query: dict[str, Any], *, limit: int | None, cursor: str | None
) -> Call[TrialPage]:
    path = f"/campaigns/{segment(campaign)}/trials"
    return get(path, TrialPage, **query, limit=limit, cursor=cursor)

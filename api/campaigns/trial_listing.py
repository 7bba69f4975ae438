"""A page of a campaign's trials between two cursors, for the API and for the pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from api.errors import PageInvalidError
from api.http.cursors import read_trial_cursor, write_trial_cursor
from results_db.records import CampaignRecord, TrialRecord
from results_db.store import Store
from results_db.trials.filter import PageEnd, TrialFilter, TrialOrder


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedTrials:
    """A page of trials, and the cursors of the pages before and after it."""

    trials: Sequence[TrialRecord]
    next_cursor: str | None
    previous_cursor: str | None
    total: int
    """Trials that pass the filters."""
    is_total_exact: bool


def page_of_trials(
    store: Store,
    campaign: CampaignRecord,
    wanted: TrialFilter,
    order: TrialOrder,
    *,
    cursor: str | None,
    before: str | None,
    limit: int,
) -> ListedTrials:
    """Reads the page after `cursor`, or the page before `before`; the first one without them.

    Raises:
        PageInvalidError: both cursors are given, or one is of another list.
    """
    if cursor is not None and before is not None:
        raise PageInvalidError("cursor and before exclude each other; leave one of them out")

    def read(given: str | None) -> PageEnd | None:
        return None if given is None else read_trial_cursor(given, campaign.id, order)

    def write(edge: PageEnd | None) -> str | None:
        return None if edge is None else write_trial_cursor(edge, campaign.id, order)

    page = store.trial_pages.page(
        campaign.id,
        wanted=wanted,
        order=order,
        after=read(cursor),
        before=read(before),
        limit=limit,
    )
    total, is_exact = store.trial_pages.count(campaign.id, wanted=wanted)
    return ListedTrials(
        trials=page.trials,
        next_cursor=write(page.end),
        previous_cursor=write(page.start),
        total=total,
        is_total_exact=is_exact,
    )

"""Trials."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Path, Query
from fastapi.responses import PlainTextResponse

from api.dependencies import CampaignDep, StoreDep
from api.etags import UNCHANGED, LiveCampaignTag
from api.filters import TrialFilterDep
from api.schemas import (
    TrialDetailRead,
    TrialId,
    TrialPage,
    TrialRead,
    TrialRepeat,
    TrialsAdded,
)
from api.trial_cursors import MAX_CURSOR, read_trial_cursor, write_trial_cursor
from api.views import trial_detail_read, trial_read
from results_db.trial_order import SortKey, TrialOrder

router = APIRouter(prefix="/v1", tags=["trials"])

TrialPath = Annotated[TrialId, Path()]

NOT_TO_BE_SNIFFED: Final = {"X-Content-Type-Options": "nosniff"}
"""Ranks print what they like; no browser is to take it for a page."""


@router.get("/campaigns/{campaign}/trials", responses=UNCHANGED)
def list_trials(
    campaign: CampaignDep,
    store: StoreDep,
    _tag: LiveCampaignTag,
    wanted: TrialFilterDep,
    sort: Annotated[
        SortKey, Query(description="What to sort by; words go by the memory that they save.")
    ] = "number",
    order: Annotated[
        Literal["asc", "desc"],
        Query(description="The least first or the most. Trials without a value come last."),
    ] = "asc",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[
        str | None, Query(max_length=MAX_CURSOR, description="Where the page before ended.")
    ] = None,
) -> TrialPage:
    """List a campaign's trials, those that fit the filters, in any order.

    Pages are of one list, as it was when the first was read: trials that are added or end meanwhile move
    nothing, and each trial that was there comes once.
    """
    listed = TrialOrder(key=sort, descending=order == "desc")
    after = None if cursor is None else read_trial_cursor(cursor, campaign.id, listed)
    page = store.trial_page(campaign.id, wanted=wanted, order=listed, after=after, limit=limit)
    return TrialPage(
        trials=[trial_read(trial) for trial in page.trials],
        next_cursor=None if page.end is None else write_trial_cursor(page.end, campaign.id, listed),
    )


@router.get("/trials/{trial_id}")
def read_trial(trial_id: TrialPath, store: StoreDep) -> TrialDetailRead:
    """Read a trial with its iterations, environment, log tail and attempts."""
    return trial_detail_read(store.trial_detail(trial_id))


@router.get("/trials/{trial_id}/log", response_class=PlainTextResponse)
def read_trial_log(trial_id: TrialPath, store: StoreDep) -> PlainTextResponse:
    """Read the last lines that a trial's ranks printed. 404 where none are kept."""
    return PlainTextResponse(store.trial_log(trial_id), headers=NOT_TO_BE_SNIFFED)


@router.post("/trials/{trial_id}/repeat", status_code=HTTPStatus.CREATED)
def repeat_trial(
    trial_id: TrialPath, store: StoreDep, body: TrialRepeat | None = None
) -> TrialsAdded:
    """Measure a COMPLETED trial's layout again: new trials, which the leaderboard pools with it.

    They count in the campaign's budget. 409 when the trial is not COMPLETED, or its campaign has ended.
    """
    times = (body or TrialRepeat()).times
    added = store.measure_again(trial_id, times=times)
    return TrialsAdded(trials=[trial_read(trial) for trial in added])


@router.post("/trials/{trial_id}/requeue", status_code=HTTPStatus.CREATED)
def requeue_trial(trial_id: TrialPath, store: StoreDep) -> TrialRead:
    """Try the layout of a FAILED, INFEASIBLE or CANCELLED trial once more, as a new trial.

    409 when the trial is none of these, when its layout waits or runs already, or when its campaign has
    ended.
    """
    return trial_read(store.requeue_trial(trial_id))


@router.post("/trials/{trial_id}/cancel")
def cancel_trial(trial_id: TrialPath, store: StoreDep) -> TrialRead:
    """Cancel a trial: at once where it waits. Twice is once.

    One that runs stays RUNNING until its worker has stopped it, which takes a heartbeat. 409 when it has
    ended in another way.
    """
    return trial_read(store.cancel_trial(trial_id))

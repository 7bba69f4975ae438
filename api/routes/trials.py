"""Trials."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import Path, Query
from fastapi.responses import PlainTextResponse

from layout_tuner.api.campaigns.trials import page_of_trials
from layout_tuner.api.dependencies import CampaignDep, StoreDep
from layout_tuner.api.http.cursors import MAX_CURSOR
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.http.query_parameters import SortKeyOf, TrialFilterDep
from layout_tuner.api.http.request_bodies import BodyRoute
from layout_tuner.api.routes.etags import UNCHANGED, TagDep
from layout_tuner.api.routes.from_records import trial_detail_read, trials_read
from layout_tuner.api.schemas.campaigns_and_trials import (
    TrialDetailRead,
    TrialPage,
    TrialRead,
    TrialRepeat,
    TrialsAdded,
)
from layout_tuner.protocol.worker_messages import TrialId
from layout_tuner.results_db.trials.filter import SORT_KEYS, TrialOrder

router = LazyRouter(route_class=BodyRoute, prefix="/v1", tags=["trials"])

TrialPath = Annotated[TrialId, Path()]


@router.get("/campaigns/{campaign}/trials", responses=UNCHANGED)
def list_trials(
    campaign: CampaignDep,
    store: StoreDep,
    wanted: TrialFilterDep,
    add_tag: TagDep,
    sort: Annotated[
        str,
        SortKeyOf(SORT_KEYS),
        Query(
            description="What to sort by: job.NAME is a knob of the trainer; choices are in the order of the memory that they save."
        ),
    ] = "number",
    order: Annotated[
        Literal["asc", "desc"],
        Query(description="Ascending or descending. Trials without a value come last."),
    ] = "asc",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[
        str | None, Query(max_length=MAX_CURSOR, description="`next_cursor` of the previous page.")
    ] = None,
    before: Annotated[
        str | None,
        Query(
            max_length=MAX_CURSOR,
            description="`previous_cursor` of the next page, instead of `cursor`.",
        ),
    ] = None,
) -> TrialPage:
    """List the trials of a campaign that pass the filters, in the requested order.

    All pages are of the list at the time of the first page: trials that start or end meanwhile do
    not move others, and each trial is listed once. `total` is of the list as it is now.
    """
    add_tag(store.events.page_version(campaign.id, beats=True))
    listed = page_of_trials(
        store,
        campaign,
        wanted,
        TrialOrder(key=sort, descending=order == "desc"),
        cursor=cursor,
        before=before,
        limit=limit,
    )
    return TrialPage.of(listed, trials=trials_read(store, listed.trials))


@router.get("/trials/{trial_id}")
def read_trial(trial_id: TrialPath, store: StoreDep) -> TrialDetailRead:
    """Read a trial with its iterations, environment, log tail and attempts."""
    return trial_detail_read(store, store.trials.detail(trial_id))


@router.get("/trials/{trial_id}/log", response_class=PlainTextResponse)
def read_trial_log(trial_id: TrialPath, store: StoreDep) -> PlainTextResponse:
    """Read the last lines of output of a trial's ranks. 404 if none are stored."""
    return PlainTextResponse(store.trials.log(trial_id))


@router.post("/trials/{trial_id}/repeat", status_code=HTTPStatus.CREATED)
def repeat_trial(
    trial_id: TrialPath, store: StoreDep, body: TrialRepeat | None = None
) -> TrialsAdded:
    """Measure the layout of a COMPLETED trial again; the leaderboard pools its trials.

    They count in the campaign's budget. 409 if the trial is not COMPLETED, or its campaign has
    ended.
    """
    times = (body or TrialRepeat()).times
    added = store.trials.measure_again(trial_id, times=times)
    return TrialsAdded(trials=trials_read(store, added))


@router.post("/trials/{trial_id}/requeue", status_code=HTTPStatus.CREATED)
def requeue_trial(trial_id: TrialPath, store: StoreDep) -> TrialRead:
    """Try the layout of a FAILED, INFEASIBLE or CANCELLED trial again, as a new trial.

    409 if the trial is in another state, if its layout already waits or runs, or if its campaign
    has ended.
    """
    return trials_read(store, [store.trials.requeue(trial_id)])[0]


@router.post("/trials/{trial_id}/cancel")
def cancel_trial(trial_id: TrialPath, store: StoreDep) -> TrialRead:
    """Cancel a trial. Repeating it is harmless.

    A waiting trial is CANCELLED at once; a running one stays RUNNING until its worker has stopped
    it after its next heartbeat. 409 if it has ended in another way.
    """
    return trials_read(store, [store.trials.cancel(trial_id)])[0]

"""Trials, and the leaderboard of a campaign as JSON, CSV or Parquet."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Path, Query, Response
from fastapi.responses import PlainTextResponse
from pydantic_core import to_json

from api.campaigns.tables import (
    INTERVAL_COLUMNS,
    PARQUET_TYPE,
    measurement_rows,
    measurement_table,
    parquet,
)
from api.campaigns.trials import page_of_trials
from api.dependencies import CampaignDep, CampaignName, StoreDep, get_campaign
from api.http.query_parameters import MAX_CURSOR, TrialFilterDep
from api.http.request_bodies import BodyRoute
from api.routes.etags import UNCHANGED, TagDep
from api.routes.from_records import leaderboard_page, trial_detail_read, trials_read
from api.schemas.campaigns_and_trials import (
    LeaderboardPage,
    TrialDetailRead,
    TrialPage,
    TrialRead,
    TrialRepeat,
    TrialsAdded,
)
from results_db.trials.filter import LeaderboardListing, ListingSortKey, SortKey, TrialOrder
from search_spaces.documents.limits import MAX_ID
from search_spaces.protocol.worker_messages import TrialId
from search_spaces.spec.objectives import Objective
from search_spaces.tables.writing import columns_of

router = APIRouter(route_class=BodyRoute, prefix="/v1", tags=["trials"])

TrialPath = Annotated[TrialId, Path()]

_FORMATS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "content": {
            "text/csv": {"schema": {"type": "string"}},
            PARQUET_TYPE: {"schema": {"type": "string", "format": "binary"}},
        }
    }
}


Ranking = Annotated[
    Objective | None, Query(description="What to rank by; by default the campaign's own objective.")
]
Front = Annotated[bool, Query(description="Only the Pareto front over the campaign's objectives.")]
Within = Annotated[
    float | None,
    Query(
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="Only layouts at most this many percent below the best, sorted by node-hours per "
        "token.",
    ),
]
Sort = Annotated[
    ListingSortKey | None,
    Query(
        description="What to sort by instead of the rank: a knob, in the order of the memory that it "
        "saves, or a metric of the layout's first trial."
    ),
]
Order = Annotated[
    Literal["asc", "desc"],
    Query(description="Direction of `sort`. Layouts without a value come last."),
]
Format = Annotated[
    Literal["json", "csv", "parquet"], Query(description="csv and parquet are measurement tables.")
]
Intervals = Annotated[
    bool, Query(description="In csv and parquet: also the number of measurements and the interval.")
]


@router.get("/campaigns/{campaign}/trials", responses=UNCHANGED)
def list_trials(
    campaign: CampaignDep,
    store: StoreDep,
    wanted: TrialFilterDep,
    add_tag: TagDep,
    sort: Annotated[
        SortKey,
        Query(
            description="What to sort by; choices are in the order of the memory that they save."
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


@router.get(
    "/campaigns/{campaign}/leaderboard",
    response_model=LeaderboardPage,
    responses={**_FORMATS, **UNCHANGED},
)
def read_leaderboard(
    campaign: CampaignName,
    store: StoreDep,
    add_tag: TagDep,
    wanted: TrialFilterDep,
    objective: Ranking = None,
    front: Front = False,
    within: Within = None,
    sort: Sort = None,
    order: Order = "asc",
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
    format: Format = "json",  # noqa: A002 - the parameter's name in the URL
    intervals: Intervals = False,
) -> Response:
    """Rank the layouts that a campaign measured, the best first, each with a 95 % interval.

    All trials of a layout count, by the median of their step times; the layout is shown with its
    first trial. Oversubscribed layouts are never ranked, nor those that break the campaign's
    constraints. A filter applies to the layout and to the measurement of its first trial. Listed
    layouts keep their rank on the whole leaderboard, and are compared with its first layout. With
    `sort`, layouts of one value are listed in the order of the objective.
    """
    # FastAPI would run each of these in a thread if it were a dependency.
    record = get_campaign(campaign, store)
    headers = add_tag(store.events.page_version(record.id))
    ranked_by = objective or record.objective
    listing = LeaderboardListing(
        front=front, wanted=wanted, within_percent=within, sort=sort, descending=order == "desc"
    )
    page = store.leaderboard.page_of_layouts(
        record.id, ranked_by, listing=listing, limit=limit, offset=offset
    )
    if format == "json":
        document = leaderboard_page(record, page, listing, ranked_by=ranked_by, offset=offset)
        return Response(to_json(document), media_type="application/json", headers=headers)
    if format == "csv":
        table = measurement_table(record, page.layouts, source=page.source, intervals=intervals)
        return Response(table, media_type="text/csv", headers=headers)
    rows = measurement_rows(record, page.layouts, source=page.source)
    columns = columns_of(rows, INTERVAL_COLUMNS if intervals else ())
    return Response(parquet(rows, columns), media_type=PARQUET_TYPE, headers=headers)

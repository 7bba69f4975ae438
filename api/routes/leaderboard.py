"""The leaderboard of a campaign, as JSON, CSV or Parquet."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import Query, Response
from pydantic_core import to_json

from layout_tuner.api.campaigns.tables import PARQUET_TYPE, aside_columns, measurement_rows, parquet
from layout_tuner.api.dependencies import CampaignName, StoreDep, get_campaign
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.http.query_parameters import SortKeyOf, TrialFilterDep
from layout_tuner.api.routes.etags import UNCHANGED, TagDep
from layout_tuner.api.routes.from_records import leaderboard_page
from layout_tuner.api.schemas.campaigns_and_trials import LeaderboardPage
from layout_tuner.documents.limits import MAX_ID
from layout_tuner.results_db.trials.filter import LISTING_SORT_KEYS, LeaderboardListing
from layout_tuner.search_spaces.objectives import Objective
from layout_tuner.search_spaces.tables.writing import columns_of, table_text

router = LazyRouter(prefix="/v1", tags=["trials"])

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
    Annotated[str, SortKeyOf(LISTING_SORT_KEYS)] | None,
    Query(
        description="What to sort by instead of the rank: a knob, in the order of the memory that it "
        "saves, a knob of the trainer as job.NAME, or a metric of the layout's first trial."
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
    rows = measurement_rows(record, page.layouts, source=page.source)
    more = aside_columns(rows, intervals=intervals)
    if format == "csv":
        return Response(table_text(rows, more), media_type="text/csv", headers=headers)
    table = parquet(rows, columns_of(rows, more))
    return Response(table, media_type=PARQUET_TYPE, headers=headers)

"""The leaderboard: a campaign's layouts, ranked, as JSON, as a table, or as a file of columns."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic_core import to_json

from api.dependencies import CampaignName, StoreDep, get_campaign
from api.etags import UNCHANGED, IfNoneMatch, tag_headers, tag_of
from api.measurement_table import INTERVAL_COLUMNS, measurement_rows, measurement_table
from api.parquet import PARQUET_TYPE, parquet
from api.schemas import MAX_ID, LeaderboardPage
from api.stated_filter import StatedFilterDep
from results_db.records import CampaignRecord
from results_db.standing import Listing
from results_db.store import Store
from search_spaces.objectives import Objective
from search_spaces.tables.writing import columns_of

router = APIRouter(prefix="/v1", tags=["trials"])

_FORMATS: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "content": {
            "text/csv": {"schema": {"type": "string"}},
            PARQUET_TYPE: {"schema": {"type": "string", "format": "binary"}},
        }
    },
}


@router.get(
    "/campaigns/{campaign}/leaderboard",
    response_model=LeaderboardPage,
    responses={**_FORMATS, **UNCHANGED},
)
def read_leaderboard(
    campaign: CampaignName,
    store: StoreDep,
    request: Request,
    wanted: StatedFilterDep,
    if_none_match: IfNoneMatch = None,
    objective: Annotated[
        Objective | None, Query(description="What to rank by; the campaign's own by default.")
    ] = None,
    front: Annotated[
        bool, Query(description="Only the Pareto front over the campaign's objectives.")
    ] = False,
    within: Annotated[
        float | None,
        Query(
            ge=0,
            le=100,
            allow_inf_nan=False,
            description="Only layouts at most so many percent under the best, the cheapest first: by "
            "node-hours a token.",
        ),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
    format: Annotated[  # noqa: A002 - the parameter's name in the URL
        Literal["json", "csv", "parquet"],
        Query(description="csv and parquet are the measurement-table format."),
    ] = "json",
    intervals: Annotated[
        bool,
        Query(
            description="In csv and parquet: also how often each was measured, and how sure it is."
        ),
    ] = False,
) -> Response:
    """Rank the layouts that a campaign measured, the best first, each with a 95 % interval.

    Repeats of a layout count together, by the median of their step times; its first trial stands for it.
    Oversubscribed ones are never ranked, nor are those that break the campaign's constraints. A filter
    narrows what is listed, by the layout and by the measurement of its first trial; what each is
    compared with stays the first of all.
    """
    # As dependencies, each of these would be handed to a thread of its own.
    record = get_campaign(campaign, store)
    headers = tag_headers(tag_of(request, store.campaign_mark(record.id), if_none_match))
    ranked_by = objective or record.objective
    listing = Listing(front=front, wanted=wanted, within_percent=within)
    if format == "json":
        page = leaderboard_page(store, record, ranked_by, listing, limit=limit, offset=offset)
        return Response(to_json(page), media_type="application/json", headers=headers)
    found = store.standings(record.id, ranked_by, listing=listing, limit=limit, offset=offset)
    source = store.import_source(record.id)
    if format == "csv":
        table = measurement_table(record, found, source=source, intervals=intervals)
        return Response(table, media_type="text/csv", headers=headers)
    rows = measurement_rows(record, found, source=source)
    columns = columns_of(rows, INTERVAL_COLUMNS if intervals else ())
    return Response(parquet(rows, columns), media_type=PARQUET_TYPE, headers=headers)


def leaderboard_page(
    store: Store,
    campaign: CampaignRecord,
    ranked_by: str,
    listing: Listing,
    *,
    limit: int,
    offset: int,
) -> dict[str, Any]:
    """A `LeaderboardPage` as plain values: validating what we wrote ourselves takes longer than reading it."""
    page = store.page_of_layouts(campaign, ranked_by, listing=listing, limit=limit, offset=offset)
    for rank, layout in enumerate(page.layouts, offset + 1):
        layout["rank"] = rank
    end = offset + len(page.layouts)
    return {
        "objective": ranked_by,
        "objectives": campaign.objectives,
        "source": page.source,
        "total": page.total,
        "constrained": page.constrained,
        "trials": page.layouts,
        "next_offset": end if page.layouts and end < page.total else None,
    }

"""The leaderboard: a campaign's layouts, ranked, as JSON, as a table, or as a file of columns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic_core import to_json

from api.dependencies import CampaignName, StoreDep, campaign_named, campaign_reference
from api.etags import UNCHANGED, IfNoneMatch, tag_headers, tag_of
from api.measurement_table import INTERVAL_COLUMNS, measurement_rows, measurement_table
from api.parquet import PARQUET_TYPE, parquet
from api.schemas import MAX_ID, LeaderboardPage
from api.stated_filter import StatedFilterDep
from results_db.leaderboard_page import PageOfLayouts
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


Ranking = Annotated[
    Objective | None, Query(description="What to rank by; the campaign's own by default.")
]
Front = Annotated[bool, Query(description="Only the Pareto front over the campaign's objectives.")]
Within = Annotated[
    float | None,
    Query(
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="Only layouts at most so many percent under the best, the cheapest first: by "
        "node-hours a token.",
    ),
]
Format = Annotated[
    Literal["json", "csv", "parquet"],
    Query(description="csv and parquet are the measurement-table format."),
]
Intervals = Annotated[
    bool,
    Query(description="In csv and parquet: also how often each was measured, and how sure it is."),
]


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
    objective: Ranking = None,
    front: Front = False,
    within: Within = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
    format: Format = "json",  # noqa: A002 - the parameter's name in the URL
    intervals: Intervals = False,
) -> Response:
    """Rank the layouts that a campaign measured, the best first, each with a 95 % interval.

    Repeats of a layout count together, by the median of their step times; its first trial stands for it.
    Oversubscribed ones are never ranked, nor are those that break the campaign's constraints. A filter
    narrows what is listed, by the layout and by the measurement of its first trial; what each is
    compared with stays the first of all.
    """
    # As dependencies, each of the next would be handed to a thread of its own.
    asked = _Asked(
        campaign=campaign_reference(campaign),
        objective=objective,
        listing=Listing(front=front, wanted=wanted, within_percent=within),
        limit=limit,
        offset=offset,
    )

    def make_headers(mark: str) -> dict[str, str]:
        return tag_headers(tag_of(request, mark, if_none_match))

    if format == "json":
        return _page(store, asked, make_headers)
    return _table(store, asked, make_headers, format, intervals=intervals)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """Which part of which leaderboard."""

    campaign: int | str
    objective: Objective | None
    listing: Listing
    limit: int
    offset: int


MakeHeaders = Callable[[str], dict[str, str]]
"""Headers of a page of a campaign with this mark; raises `PageUnchanged` where the client has it."""


def _page(store: Store, asked: _Asked, make_headers: MakeHeaders) -> Response:
    headers: dict[str, str] = {}
    page = store.page_of_layouts(
        asked.campaign,
        asked.objective,
        look_at_mark=lambda mark: headers.update(make_headers(mark)),
        listing=asked.listing,
        limit=asked.limit,
        offset=asked.offset,
    )
    body = to_json(_document(page, asked.offset))
    return Response(body, media_type="application/json", headers=headers)


def _document(page: PageOfLayouts, offset: int) -> dict[str, Any]:
    """A `LeaderboardPage` as plain values: validating what we wrote ourselves takes longer than reading it."""
    for rank, layout in enumerate(page.layouts, offset + 1):
        layout["rank"] = rank
    end = offset + len(page.layouts)
    return {
        "objective": page.objective,
        "objectives": page.objectives,
        "source": page.source,
        "total": page.total,
        "constrained": page.constrained,
        "trials": page.layouts,
        "next_offset": end if page.layouts and end < page.total else None,
    }


def _table(
    store: Store,
    asked: _Asked,
    make_headers: MakeHeaders,
    form: Literal["csv", "parquet"],
    *,
    intervals: bool,
) -> Response:
    record = campaign_named(asked.campaign, store)
    headers = make_headers(store.campaign_mark(record.id))
    found = store.standings(
        record.id,
        asked.objective or record.objective,
        listing=asked.listing,
        limit=asked.limit,
        offset=asked.offset,
    )
    source = store.import_source(record.id)
    if form == "csv":
        table = measurement_table(record, found, source=source, intervals=intervals)
        return Response(table, media_type="text/csv", headers=headers)
    rows = measurement_rows(record, found, source=source)
    columns = columns_of(rows, INTERVAL_COLUMNS if intervals else ())
    return Response(parquet(rows, columns), media_type=PARQUET_TYPE, headers=headers)

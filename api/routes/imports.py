"""Measurements that others took: imported as campaigns of their own; and campaigns as tables."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request, Response

from api.dependencies import CampaignDep, StoreDep
from api.errors import DocumentTypeUnsupportedError
from api.imports import read_import
from api.measurement_table import trial_table
from api.schemas import ImportRead
from api.views import campaigns_read
from results_db.imports import IMPORTED
from search_spaces.tables import write_table

router = APIRouter(prefix="/v1/campaigns", tags=["campaigns"])

CSV_TYPE = "text/csv"
_CSV_CONTENT = {CSV_TYPE: {"schema": {"type": "string"}}}


async def table_body(request: Request) -> bytes:
    """The body as it came."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in ("", CSV_TYPE):
        raise DocumentTypeUnsupportedError(f"content type {content_type[:80]!r} is not {CSV_TYPE}")
    return await request.body()


@router.post(
    "/import",
    status_code=HTTPStatus.CREATED,
    openapi_extra={"requestBody": {"required": True, "content": _CSV_CONTENT}},
)
def import_campaigns(
    body: Annotated[bytes, Depends(table_body)],
    store: StoreDep,
    name: Annotated[
        str | None,
        Query(max_length=64, description="Of the campaign; several are numbered after it."),
    ] = None,
    cell: Annotated[
        list[str] | None,
        Query(description="Only these cells, as model=GPT-3.6B,num_devices=64; may be repeated."),
    ] = None,
) -> ImportRead:
    """Import a measurement table: every cell becomes a campaign that has ended.

    Refused with 422 when it is no measurement table (the answer names the row and the reason), with
    409 when a name is taken. Either all of it is imported, or nothing.
    """
    imports, notes = read_import(body, name=name, cells=cell or ())
    campaigns = store.import_campaigns(imports)
    return ImportRead(campaigns=campaigns_read(store, campaigns), notes=list(notes))


@router.get(
    "/{campaign}/table",
    response_class=Response,
    responses={200: {"content": _CSV_CONTENT}},
)
def read_table_of_campaign(campaign: CampaignDep, store: StoreDep) -> Response:
    """All that a campaign measured as a measurement table, failures included, in order.

    Of an imported campaign it is the table that it was made of.
    """
    if campaign.strategy == IMPORTED:
        text = write_table(store.imported_table(campaign.id))
    else:
        ended = store.trials(campaign.id, states=("COMPLETED", "INFEASIBLE", "FAILED"))
        # Ranks that shared devices measured something else.
        told = [t for t in ended if t.measurement is None or not t.measurement.oversubscribed]
        text = trial_table(campaign, told)
    return Response(text, media_type=CSV_TYPE)

"""Measurement tables: imported as campaigns, and written for a campaign."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Final

from fastapi import Depends, Query, Request, Response

from layout_tuner.api.campaigns.imports import read_import
from layout_tuner.api.campaigns.tables import trial_table
from layout_tuner.api.dependencies import CampaignDep, SettingsDep, StoreDep
from layout_tuner.api.errors import DocumentTypeUnsupportedError
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.routes.campaigns import SharingDep
from layout_tuner.api.routes.from_records import campaigns_read
from layout_tuner.api.schemas.campaigns_and_trials import ImportRead
from layout_tuner.documents.json_and_yaml import media_type_of, read_json
from layout_tuner.protocol.outcome import NOT_OF_THE_LAYOUT
from layout_tuner.results_db.access.owners_and_groups import Sharing
from layout_tuner.results_db.campaigns.imported_tables import IMPORTED
from layout_tuner.search_spaces.tables import write_table
from layout_tuner.search_spaces.tables.knob_columns import TableKnobs

router = LazyRouter(prefix="/v1/campaigns", tags=["campaigns"])

CSV_TYPE: Final = "text/csv"
MAX_DECLARATIONS: Final = 32_000
"""Most characters of the declarations of job knobs: they are a part of the request's line."""
_CSV_CONTENT: Final = {CSV_TYPE: {"schema": {"type": "string"}}}


async def table_body(request: Request) -> bytes:
    content_type = media_type_of(request.headers.get("content-type", ""))
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
    settings: SettingsDep,
    sharing: SharingDep,
    name: Annotated[
        str | None,
        Query(
            max_length=64,
            description="Name of the campaign; if there are several, each gets a number after it.",
        ),
    ] = None,
    cell: Annotated[
        list[str] | None,
        Query(
            description="Only these cells, for example model=GPT-3.6B,num_devices=64; may be repeated."
        ),
    ] = None,
    knob: Annotated[
        list[str] | None,
        Query(
            description="Columns that are job knobs, for example dispatcher=moe_dispatcher for the "
            "column dispatcher and the knob moe_dispatcher; may be repeated."
        ),
    ] = None,
    knobs: Annotated[
        str | None,
        Query(
            max_length=MAX_DECLARATIONS,
            description="Declarations of job knobs by name, a JSON object.",
        ),
    ] = None,
) -> ImportRead:
    """Import a measurement table: each cell becomes a campaign that has ended.

    422 if it is not a measurement table (the answer states the row and the reason), 409 if a name
    is taken. Either all of it is imported, or nothing.
    """
    declared = None if knobs is None else read_json(knobs.encode())
    table_knobs = TableKnobs.read(knob or (), declared)
    imports, notes = read_import(body, name=name, cells=cell or (), knobs=table_knobs)
    shared = Sharing(**{"visibility": settings.default_visibility, **sharing})
    campaigns = store.imports.add(imports, shared)
    return ImportRead(campaigns=campaigns_read(store, campaigns), notes=list(notes))


@router.get(
    "/{campaign}/table", response_class=Response, responses={200: {"content": _CSV_CONTENT}}
)
def read_table_of_campaign(campaign: CampaignDep, store: StoreDep) -> Response:
    """Read all measurements of a campaign as a measurement table, in order, with failures.

    Failures that say nothing about the layout (`node_lost`, `host_resource`) are left out.

    For an imported campaign this is the imported table.
    """
    if campaign.strategy == IMPORTED:
        text = write_table(store.imports.table(campaign.id))
    else:
        ended = store.trials.find(campaign.id, states=("COMPLETED", "INFEASIBLE", "FAILED"))
        # Measurements of ranks that shared devices are left out, and failures of nodes.
        of_layouts = [trial for trial in ended if trial.reason not in NOT_OF_THE_LAYOUT]
        shown = [t for t in of_layouts if t.measurement is None or not t.measurement.oversubscribed]
        text = trial_table(campaign, shown)
    return Response(text, media_type=CSV_TYPE)

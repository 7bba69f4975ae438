"""Campaigns: submitted, listed, read, paused, resumed, cancelled."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response

from api.dependencies import CampaignDep, SettingsDep, StoreDep, read_cursor, write_cursor
from api.documents import JSON_TYPE, YAML_TYPES, reader_of
from api.errors import DocumentTooLargeError, DocumentTypeUnsupportedError
from api.schemas import CampaignDetail, CampaignPage
from api.views import campaign_detail, campaign_read
from results_db.campaign_filter import CampaignFilter
from results_db.errors import CampaignDuplicateError, CampaignNotFoundError
from results_db.records import CampaignState
from results_db.store import Store
from search_spaces.campaign import CampaignSpec
from search_spaces.errors import CampaignInvalidError, SearchSpaceError
from search_spaces.measured_constants import with_measured_constants

router = APIRouter(prefix="/v1/campaigns", tags=["campaigns"])

_DOCUMENT_SCHEMA = {
    "type": "object",
    "required": ["name", "model", "cluster", "space"],
    "properties": {
        "name": {"type": "string", "pattern": r"^(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"},
        "model": {"description": "A preset's name, or a model's shape."},
        "cluster": {"description": "A preset's name, or a cluster's description."},
        "space": {"description": "A preset's name, or values for each knob."},
        "objective": {
            "description": "What ranks; or a list, of which the first ranks and all make the front.",
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
            ],
        },
        "constraints": {"type": "object"},
        "strategy": {"type": "string"},
        "seed": {"type": "integer"},
        "budget": {"type": "object"},
        "probe": {"type": "object"},
        "stop": {"type": "object"},
        "knowledge": {"type": "string", "enum": ["auto", "none"]},
        "start_from": {"type": "array", "items": {"type": "string"}},
    },
    "example": {
        "name": "tiny",
        "model": "tiny",
        "cluster": "local-cpu",
        "objective": "tokens_per_s",
        "strategy": "random",
        "budget": {"trials": 10},
        "space": {"global_batch_size": 16, "tp": [1, 2], "pp": [1, 2], "dp": [1, 2]},
    },
}


async def campaign_body(request: Request, settings: SettingsDep) -> bytes:
    """The body as it came."""
    body = await request.body()
    if len(body) > settings.max_document_bytes:
        raise DocumentTooLargeError(
            f"the campaign is {len(body)} bytes long; the most is {settings.max_document_bytes}"
        )
    return body


def campaign_document(request: Request, body: Annotated[bytes, Depends(campaign_body)]) -> Any:
    """The body, JSON or YAML as its content type says.

    Not a coroutine: FastAPI runs it beside the event loop, which a long document would hold up.
    """
    content_type = request.headers.get("content-type", "")
    read = reader_of(content_type)
    if read is None:
        raise DocumentTypeUnsupportedError(
            f"content type {content_type[:80]!r} is not one of {JSON_TYPE}, {', '.join(YAML_TYPES)}"
        )
    return read(body)


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                media_type: {"schema": _DOCUMENT_SCHEMA}
                for media_type in (JSON_TYPE, YAML_TYPES[0])
            },
        }
    },
)
def create_campaign(
    document: Annotated[Any, Depends(campaign_document)],
    store: StoreDep,
    settings: SettingsDep,
    response: Response,
) -> CampaignDetail:
    """Submit a campaign, as JSON or YAML. It starts at once.

    Refused with 422 when a field is wrong, when no layout of the space is legal (the answer says
    which rule excluded how many), or when the model is too large for every layout; with 409 when the
    name is taken. Nothing is kept of a campaign that is refused. Constants of its cluster that it does
    not state, and that were measured on this machine (`layout-tuner calibrate`), are taken from there.
    """
    spec = CampaignSpec.from_mapping(_with_measured_constants(document, settings.data_dir))
    _refuse_taken_name(store, spec.name)
    _refuse_unknown_sources(store, spec)
    legal = spec.legal_set()
    spec.refuse_if_too_large(legal)
    campaign = store.create_campaign(spec.to_mapping(), num_legal_layouts=len(legal))
    response.headers["Location"] = f"{router.prefix}/{campaign.name}"
    return campaign_detail(store, campaign)


def _with_measured_constants(document: Any, data_dir: Path | None) -> Any:
    """The document with what is known of its cluster; anything malformed is the reader's to refuse."""
    if data_dir is None or not isinstance(document, dict) or "cluster" not in document:
        return document
    try:
        return {**document, "cluster": with_measured_constants(document["cluster"], data_dir)}
    except SearchSpaceError as error:
        raise error.within("cluster") from error


def _refuse_taken_name(store: Store, name: str) -> None:
    """Says so before the legal set is enumerated; the database has the last word."""
    try:
        store.campaign_by_name(name)
    except CampaignNotFoundError:
        return
    raise CampaignDuplicateError(f"a campaign named {name!r} exists already; choose another name")


def _refuse_unknown_sources(store: Store, spec: CampaignSpec) -> None:
    for name in spec.start_from:
        try:
            store.campaign_by_name(name)
        except CampaignNotFoundError as error:
            raise CampaignInvalidError(str(error), field="start_from") from error


@router.get("")
def list_campaigns(
    store: StoreDep,
    state: Annotated[list[CampaignState] | None, Query(description="Only these states.")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=80)] = None,
) -> CampaignPage:
    """List campaigns, the youngest first."""
    before = read_cursor(cursor)
    # One more than asked for tells whether there is a next page.
    found = store.campaigns(
        chosen=CampaignFilter(states=tuple(state or ())), before_id=before, limit=limit + 1
    )
    page = found[:limit]
    return CampaignPage(
        campaigns=[campaign_read(store, campaign) for campaign in page],
        next_cursor=write_cursor(page[-1].id) if len(found) > limit else None,
    )


@router.get("/{campaign}")
def read_campaign(campaign: CampaignDep, store: StoreDep) -> CampaignDetail:
    """Read a campaign: its state, its progress, and the description it is judged against."""
    return campaign_detail(store, campaign)


@router.post("/{campaign}/pause")
def pause_campaign(campaign: CampaignDep, store: StoreDep) -> CampaignDetail:
    """Hand out no more trials; those that run finish. 409 when it has ended."""
    return campaign_detail(store, store.pause_campaign(campaign.id))


@router.post("/{campaign}/resume")
def resume_campaign(campaign: CampaignDep, store: StoreDep) -> CampaignDetail:
    """Take a paused campaign up again. 409 when it has ended."""
    return campaign_detail(store, store.resume_campaign(campaign.id))


@router.post("/{campaign}/cancel")
def cancel_campaign(campaign: CampaignDep, store: StoreDep) -> CampaignDetail:
    """End a campaign now. Waiting trials are cancelled, running ones are stopped by their workers."""
    return campaign_detail(store, store.cancel_campaign(campaign.id))

"""Campaigns: submitted, listed, read, changed, paused, resumed, cancelled, cloned, deleted."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Header, Query, Response

from api.campaign_documents import (
    CAMPAIGN_SCHEMA,
    CHANGES_SCHEMA,
    ChangesDep,
    DocumentDep,
    body_of,
)
from api.campaign_schemas import CampaignChange
from api.dependencies import CampaignDep, SettingsDep, StoreDep, read_cursor, write_cursor
from api.owners import OwnCampaignDep
from api.problems import names_fields_of_body
from api.schemas import CampaignDetail, CampaignPage
from api.submission import Submission
from api.texts import IdempotencyKeyText, Moment, QueryText
from api.views import campaign_detail, campaigns_read
from results_db.campaign_filter import CampaignFilter
from results_db.records import CampaignRecord, CampaignState
from search_spaces.campaign import StrategyName
from search_spaces.objectives import AnyObjective

router = APIRouter(prefix="/v1/campaigns", tags=["campaigns"])

IdempotencyKey = Annotated[
    IdempotencyKeyText | None,
    Header(
        description="The same key with the same request makes one campaign, however often it is sent."
    ),
]
REPLAY: Final = "Idempotent-Replay"
"""Header of an answer to a request that had made its campaign before."""

_OF_DOCUMENTS: Final = [Depends(names_fields_of_body)]

_MADE: Final[dict[int | str, dict[str, Any]]] = {
    HTTPStatus.CREATED: {
        "headers": {
            "Location": {"description": "The campaign.", "schema": {"type": "string"}},
            REPLAY: {
                "description": "`true` where an earlier sending of the request made it.",
                "schema": {"type": "string"},
            },
        }
    }
}


def get_submission(store: StoreDep, settings: SettingsDep) -> Submission:
    """Makes campaigns in the name of whoever asks."""
    return Submission(store, settings.data_dir)


SubmissionDep = Annotated[Submission, Depends(get_submission)]


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    dependencies=_OF_DOCUMENTS,
    openapi_extra=body_of(CAMPAIGN_SCHEMA),
    responses=_MADE,
)
def create_campaign(
    document: DocumentDep,
    submission: SubmissionDep,
    store: StoreDep,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> CampaignDetail:
    """Submit a campaign, as JSON or YAML. It starts at once.

    Refused with 422 when a field is wrong, when no layout of the space is legal (the answer says
    which rule excluded how many), when the model is too large for every layout, or when the key was sent
    with another document; with 409 when the name is taken. Nothing is kept of a campaign that is refused.
    Constants of its cluster that it does not state, and that were measured on this machine
    (`layout-tuner calibrate`), are taken from there.
    """
    campaign, is_replay = submission.create(document, idempotency_key)
    _tell(response, campaign, is_replay=is_replay)
    return campaign_detail(store, campaign)


@router.post(
    "/{campaign}/clone",
    status_code=HTTPStatus.CREATED,
    dependencies=_OF_DOCUMENTS,
    openapi_extra=body_of(CHANGES_SCHEMA, required=False),
    responses=_MADE,
)
def clone_campaign(
    campaign: CampaignDep,
    changes: ChangesDep,
    submission: SubmissionDep,
    store: StoreDep,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> CampaignDetail:
    """Submit a campaign like another one, but for the fields of the document that the body names.

    Each of them takes the place of the whole field. Without a name it is called after the other one,
    with the first number that is free. It is refused as a new campaign is.
    """
    clone, is_replay = submission.clone(campaign, changes, idempotency_key)
    _tell(response, clone, is_replay=is_replay)
    return campaign_detail(store, clone)


def _tell(response: Response, campaign: CampaignRecord, *, is_replay: bool) -> None:
    response.headers["Location"] = f"{router.prefix}/{campaign.name}"
    if is_replay:
        response.headers[REPLAY] = "true"


@router.get("")
def list_campaigns(
    store: StoreDep,
    state: Annotated[list[CampaignState] | None, Query(description="Only these states.")] = None,
    model: Annotated[QueryText | None, Query(description="Name of the model.")] = None,
    cluster: Annotated[QueryText | None, Query(description="Name of the cluster.")] = None,
    strategy: Annotated[
        StrategyName | Literal["imported"] | None, Query(description="How layouts are proposed.")
    ] = None,
    objective: Annotated[
        AnyObjective | None, Query(description="Any of the campaign's objectives.")
    ] = None,
    created_by: Annotated[
        QueryText | None, Query(description="Name of the token that submitted it.")
    ] = None,
    name_contains: Annotated[
        QueryText | None, Query(description="A part of the name, in upper or lower case.")
    ] = None,
    created_after: Annotated[Moment | None, Query(description="This moment or later.")] = None,
    created_before: Annotated[Moment | None, Query(description="Earlier than this moment.")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=80)] = None,
) -> CampaignPage:
    """List campaigns that meet all that is asked, the youngest first."""
    chosen = CampaignFilter(
        states=tuple(state or ()),
        model=model,
        cluster=cluster,
        strategy=strategy,
        objective=objective,
        created_by=created_by,
        name_contains=name_contains,
        created_after=created_after,
        created_before=created_before,
    )
    # One more than asked for tells whether there is a next page.
    found = store.campaigns(chosen=chosen, before_id=read_cursor(cursor), limit=limit + 1)
    page = found[:limit]
    return CampaignPage(
        campaigns=campaigns_read(store, page),
        next_cursor=write_cursor(page[-1].id) if len(found) > limit else None,
    )


@router.get("/{campaign}")
def read_campaign(campaign: CampaignDep, store: StoreDep) -> CampaignDetail:
    """Read a campaign: its state, its progress, and the description it is judged against."""
    return campaign_detail(store, campaign)


@router.patch("/{campaign}", dependencies=_OF_DOCUMENTS)
def update_campaign(
    campaign: OwnCampaignDep, changes: CampaignChange, store: StoreDep
) -> CampaignDetail:
    """Change a campaign's budget, while it has not ended, and its notes. All of it, or nothing.

    The driver goes by the new budget at once. 409 for the budget of a campaign that has ended: it is not
    reopened; clone it.
    """
    given = changes.model_dump(exclude_unset=True)
    changed = store.update_campaign(
        campaign.id, budget=given.get("budget"), notes=given.get("notes")
    )
    return campaign_detail(store, changed)


@router.delete("/{campaign}", status_code=HTTPStatus.NO_CONTENT)
def delete_campaign(campaign: OwnCampaignDep, store: StoreDep) -> None:
    """Delete a campaign that has ended, with all that was measured for it.

    409 while it has not ended, while a worker still stops one of its trials, and while an open campaign
    names it in `start_from`.
    """
    store.delete_campaign(campaign.id)


@router.post("/{campaign}/pause")
def pause_campaign(campaign: OwnCampaignDep, store: StoreDep) -> CampaignDetail:
    """Hand out no more trials; those that run finish. 409 when it has ended."""
    return campaign_detail(store, store.pause_campaign(campaign.id))


@router.post("/{campaign}/resume")
def resume_campaign(campaign: OwnCampaignDep, store: StoreDep) -> CampaignDetail:
    """Take a paused campaign up again. 409 when it has ended."""
    return campaign_detail(store, store.resume_campaign(campaign.id))


@router.post("/{campaign}/cancel")
def cancel_campaign(campaign: OwnCampaignDep, store: StoreDep) -> CampaignDetail:
    """End a campaign now. Waiting trials are cancelled, running ones are stopped by their workers."""
    return campaign_detail(store, store.cancel_campaign(campaign.id))

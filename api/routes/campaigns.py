"""Campaigns."""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

from fastapi import Depends, Header, Query, Response

from layout_tuner.api.campaigns.submission import Submission
from layout_tuner.api.dependencies import CampaignDep, OwnCampaignDep, SettingsDep, StoreDep
from layout_tuner.api.http.cursors import read_cursor, write_cursor
from layout_tuner.api.http.error_responses import names_fields_of_body
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.http.request_bodies import (
    CAMPAIGN_SCHEMA,
    CHANGES_SCHEMA,
    BodyRoute,
    ChangesDep,
    DocumentDep,
    body_of,
)
from layout_tuner.api.routes.etags import UNCHANGED, TagDep
from layout_tuner.api.routes.from_records import campaign_detail, campaigns_read
from layout_tuner.api.schemas.campaigns_and_trials import (
    CampaignChange,
    CampaignDetail,
    CampaignPage,
)
from layout_tuner.api.schemas.text_types import IdempotencyKeyText, Moment, QueryText
from layout_tuner.results_db.access.owners_and_groups import Sharing
from layout_tuner.results_db.campaigns.filter import CampaignFilter
from layout_tuner.results_db.records import MAX_PRIORITY, CampaignRecord, CampaignState, Visibility
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign_settings import StrategyName
from layout_tuner.search_spaces.objectives import AnyObjective

router = LazyRouter(route_class=BodyRoute, prefix="/v1/campaigns", tags=["campaigns"])

IdempotencyKey = Annotated[
    IdempotencyKeyText | None,
    Header(
        description="Requests with the same key and content create one campaign, however often sent."
    ),
]
IfExists = Annotated[
    Literal["refuse", "return"],
    Query(description="return: a campaign of this name and content is the answer, not an error."),
]
REPLAY: Final = "Idempotent-Replay"
"""Header of the response to a repeated request, whose campaign existed already."""

_OF_DOCUMENTS: Final = [Depends(names_fields_of_body)]

_MADE: Final[dict[int | str, dict[str, Any]]] = {
    HTTPStatus.CREATED: {
        "headers": {
            "Location": {"description": "The campaign.", "schema": {"type": "string"}},
            REPLAY: {
                "description": "`true` if an earlier request created it.",
                "schema": {"type": "string"},
            },
        }
    }
}


def get_submission(store: StoreDep, settings: SettingsDep) -> Submission:
    """Submits campaigns in the name of the actor."""
    sharing = Sharing(visibility=settings.default_visibility)
    return Submission(store, settings.data_dir, sharing)


SubmissionDep = Annotated[Submission, Depends(get_submission)]

VisibilityQuery = Annotated[
    Visibility | None,
    Query(description="private: the owner alone sees it; group: its group too; or everyone."),
]
GroupQuery = Annotated[QueryText | None, Query(description="The group that it counts for.")]
PriorityQuery = Annotated[
    int | None,
    Query(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Higher ones of an owner run first."),
]


async def get_sharing(
    visibility: VisibilityQuery = None, group: GroupQuery = None, priority: PriorityQuery = None
) -> dict[str, Any]:
    """The fields of a `Sharing` that a request states."""
    given = {"visibility": visibility, "group": group, "priority": priority}
    return {name: value for name, value in given.items() if value is not None}


SharingDep = Annotated[dict[str, Any], Depends(get_sharing)]


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
    sharing: SharingDep,
    idempotency_key: IdempotencyKey = None,
    if_exists: IfExists = "refuse",
) -> CampaignDetail:
    """Submit a campaign, as JSON or YAML. It starts at once.

    422 if a field is wrong, if no layout of the space is legal (the answer states how many each
    rule excluded), if the model is too large for every layout, or if the key was sent with another
    document; 409 if the name is taken. A refused campaign leaves nothing behind. Constants of the
    cluster that the document omits are taken from `layout-tuner calibrate` on this machine, if it
    was run. Without `visibility` it has the service's default.
    """
    submission.sharing = replace(submission.sharing, **sharing)
    returns_equal = if_exists == "return"
    made = submission.create(document, idempotency_key, returns_equal=returns_equal)
    return _made(store, response, *made)


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
    sharing: SharingDep,
    idempotency_key: IdempotencyKey = None,
) -> CampaignDetail:
    """Submit a copy of a campaign, with the fields of the body in place of its own.

    Each field of the body replaces the whole field. Without a name, the copy gets the name of the
    original with the first free number. It is refused for the same reasons as a new campaign.
    Without `visibility` those who see the original see it.
    """
    made = submission.clone(campaign, changes, idempotency_key, sharing)
    return _made(store, response, *made)


def _made(
    store: Store, response: Response, campaign: CampaignRecord, is_replay: bool
) -> CampaignDetail:
    response.headers["Location"] = f"{router.prefix}/{campaign.name}"
    if is_replay:
        response.headers[REPLAY] = "true"
    return campaign_detail(store, campaign)


@router.get("", responses=UNCHANGED)
def list_campaigns(
    store: StoreDep,
    add_tag: TagDep,
    state: Annotated[list[CampaignState] | None, Query(description="Only these states.")] = None,
    model: Annotated[QueryText | None, Query(description="Name of the model.")] = None,
    cluster: Annotated[QueryText | None, Query(description="Name of the cluster.")] = None,
    strategy: Annotated[
        StrategyName | Literal["imported"] | None, Query(description="Name of the strategy.")
    ] = None,
    objective: Annotated[
        AnyObjective | None, Query(description="One of the campaign's objectives.")
    ] = None,
    created_by: Annotated[QueryText | None, Query(description="Name of its owner.")] = None,
    visibility: VisibilityQuery = None,
    group: GroupQuery = None,
    name_contains: Annotated[
        QueryText | None, Query(description="Part of the name; upper and lower case are equal.")
    ] = None,
    created_after: Annotated[Moment | None, Query(description="At this time or later.")] = None,
    created_before: Annotated[Moment | None, Query(description="Before this time.")] = None,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
    cursor: Annotated[str | None, Query(max_length=80)] = None,
) -> CampaignPage:
    """List the campaigns that pass all filters, the newest first."""
    chosen = CampaignFilter(
        states=tuple(state or ()),
        model=model,
        cluster=cluster,
        strategy=strategy,
        objective=objective,
        created_by=created_by,
        visibility=visibility,
        group=group,
        name_contains=name_contains,
        created_after=created_after,
        created_before=created_before,
    )
    # One campaign more than the page shows whether there is a next page.
    found = store.campaigns.find(chosen=chosen, before_id=read_cursor(cursor), limit=limit + 1)
    campaigns = found[:limit]
    page = CampaignPage(
        campaigns=campaigns_read(store, campaigns),
        next_cursor=write_cursor(campaigns[-1].id) if len(found) > limit else None,
    )
    add_tag(page.model_dump_json())
    return page


@router.get("/{campaign}")
def read_campaign(campaign: CampaignDep, store: StoreDep) -> CampaignDetail:
    """Read a campaign: its state, its progress, and its description."""
    return campaign_detail(store, campaign)


@router.patch("/{campaign}", dependencies=_OF_DOCUMENTS)
def update_campaign(
    campaign: OwnCampaignDep, changes: CampaignChange, store: StoreDep
) -> CampaignDetail:
    """Change a campaign's budget, its notes and who sees it: either all of it, or nothing.

    The driver uses the new budget at once. 409 for the budget of a campaign that has ended: clone
    it instead; and to show everyone a campaign where everyone sees another one of its name.
    """
    given = changes.model_dump(exclude_unset=True)
    budget, notes = given.pop("budget", None), given.pop("notes", None)
    changed = store.campaigns.update(campaign.id, budget=budget, notes=notes, sharing=given)
    return campaign_detail(store, changed)


@router.delete("/{campaign}", status_code=HTTPStatus.NO_CONTENT)
def delete_campaign(campaign: OwnCampaignDep, store: StoreDep) -> None:
    """Delete a campaign that has ended, with all its measurements.

    409 if it has not ended, while a worker still stops one of its trials, and while an open
    campaign names it in `start_from`.
    """
    store.campaigns.delete(campaign.id)


@router.post("/{campaign}/pause")
def pause_campaign(campaign: OwnCampaignDep, store: StoreDep) -> CampaignDetail:
    """Pause a campaign: no more trials start, and running ones finish. 409 if it has ended."""
    return campaign_detail(store, store.campaigns.pause(campaign.id))


@router.post("/{campaign}/resume")
def resume_campaign(campaign: OwnCampaignDep, store: StoreDep) -> CampaignDetail:
    """Resume a paused campaign. 409 if it has ended."""
    return campaign_detail(store, store.campaigns.resume(campaign.id))


@router.post("/{campaign}/cancel")
def cancel_campaign(campaign: OwnCampaignDep, store: StoreDep) -> CampaignDetail:
    """End a campaign now. Waiting trials are cancelled; workers stop the running ones."""
    return campaign_detail(store, store.campaigns.cancel(campaign.id))

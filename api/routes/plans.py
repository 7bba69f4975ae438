"""Plans of campaigns."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import Depends, Path, Query, Response

from layout_tuner.api.dependencies import StoreDep
from layout_tuner.api.http.error_responses import names_fields_of_body
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.http.query_parameters import JobDep
from layout_tuner.api.http.request_bodies import CAMPAIGN_SCHEMA, BodyRoute, DocumentDep, body_of
from layout_tuner.api.routes.campaigns import SubmissionDep
from layout_tuner.api.schemas.plans import PlanRead
from layout_tuner.documents.limits import MAX_ID
from layout_tuner.predictions.belief.plan import DEFAULT_TOP, MAX_TOP, Plan
from layout_tuner.results_db.campaigns.plans import PlanOptions
from layout_tuner.search_spaces.campaigns.fidelity import PROBE_START_S

router = LazyRouter(route_class=BodyRoute, prefix="/v1/plans", tags=["campaigns"])

_ACCEPTED: Final[dict[int | str, dict[str, Any]]] = {
    HTTPStatus.ACCEPTED: {
        "description": "The driver makes the plan; the event `plan.ended` follows.",
        "model": PlanRead,
        "headers": {"Location": {"description": "The plan.", "schema": {"type": "string"}}},
    }
}


@router.post(
    "",
    dependencies=[Depends(names_fields_of_body)],
    openapi_extra=body_of(CAMPAIGN_SCHEMA),
    response_model=Plan,
    responses=_ACCEPTED,
)
def plan_campaign(
    document: DocumentDep,
    submission: SubmissionDep,
    job: JobDep,
    top: Annotated[int, Query(ge=1, le=MAX_TOP, description="Layouts to list.")] = DEFAULT_TOP,
    probe_start_s: Annotated[
        float,
        Query(
            ge=0,
            le=1e6,
            allow_inf_nan=False,
            description="Seconds that a probe is taken to last besides its steps.",
        ),
    ] = PROBE_START_S,
    compare: Annotated[
        list[str] | None,
        Query(
            min_length=2,
            max_length=2,
            description="A layout by rank or key; give two, and their difference is explained.",
        ),
    ] = None,
) -> Any:
    """Rank the legal layouts of a campaign by predictions, without running any.

    The body is that of a new campaign, which is not submitted. The predictions are for the trainer
    of its probes, and use the measurements from which the campaign would start. 422 for the reasons
    of a new campaign. With more than 50,000 legal layouts the driver makes the plan, in turns of
    owners: 202 with its id, and 409 while 8 others of the same owner wait.
    """
    keys = None if compare is None else (compare[0], compare[1])
    options = PlanOptions(top=top, probe_start_s=probe_start_s, job=job, compare=keys)
    planned = submission.plan(document, options, by_driver=True)
    if isinstance(planned, Plan):
        return planned
    return Response(
        PlanRead.of_record(planned).model_dump_json(),
        HTTPStatus.ACCEPTED,
        headers={"Location": f"{router.prefix}/{planned.id}"},
        media_type="application/json",
    )


@router.get("/{plan_id}")
def read_plan(
    plan_id: Annotated[int, Path(ge=1, le=MAX_ID, description="The plan's id.")], store: StoreDep
) -> PlanRead:
    """Read a plan that the driver makes or has made. It is kept for a day."""
    return PlanRead.of_record(store.plans.get(plan_id))

"""Plans of campaigns."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from starlette.concurrency import run_in_threadpool

from api.dependencies import StoreDep
from api.http.job_parameters import JobDep
from api.http.problems import names_fields_of_body
from api.http.request_bodies import CAMPAIGN_SCHEMA, DocumentDep, JsonRoute, body_of
from api.plans.planning import plan_of
from api.routes.campaigns import SubmissionDep
from search_spaces.belief.plan import DEFAULT_TOP, MAX_TOP, PROBE_START_S, Plan

router = APIRouter(route_class=JsonRoute, prefix="/v1/plans", tags=["campaigns"])


@router.post(
    "",
    dependencies=[Depends(names_fields_of_body)],
    openapi_extra=body_of(CAMPAIGN_SCHEMA),
)
async def plan_campaign(
    request: Request,
    document: DocumentDep,
    submission: SubmissionDep,
    store: StoreDep,
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
) -> Plan:
    """Rank the legal layouts of a campaign by predictions, without running or storing anything.

    The body is that of a new campaign. The predictions use the measurements from which the campaign
    would start. 422 for the reasons of a new campaign, and if there are more than 50,000 legal
    layouts: `layout-tuner plan` plans those.
    """
    # Fitting thousands of measurements takes seconds of a core: one plan at a time.
    async with request.app.state.planning:
        return await run_in_threadpool(
            plan_of, document, submission, store, top=top, probe_start_s=probe_start_s, job=job
        )

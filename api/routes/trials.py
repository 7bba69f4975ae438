"""Trials and the leaderboard."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Response

from api.dependencies import CampaignDep, StoreDep, read_cursor, write_cursor
from api.etags import UNCHANGED, CampaignTag, LiveCampaignTag, tag_headers
from api.measurement_table import measurement_table
from api.schemas import MAX_ID, LeaderboardPage, TrialDetailRead, TrialId, TrialPage
from api.views import ranked_trials, trial_detail_read, trial_read
from results_db.records import TrialState
from results_db.standing import Listing
from search_spaces.campaign import Objective

router = APIRouter(prefix="/v1", tags=["trials"])


@router.get("/campaigns/{campaign}/trials", responses=UNCHANGED)
def list_trials(
    campaign: CampaignDep,
    store: StoreDep,
    _tag: LiveCampaignTag,
    state: Annotated[list[TrialState] | None, Query(description="Only these states.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=80)] = None,
) -> TrialPage:
    """List a campaign's trials in order of their numbers."""
    after = read_cursor(cursor) or 0
    # One more than asked for tells whether there is a next page.
    found = store.trials(campaign.id, states=state or (), after_number=after, limit=limit + 1)
    page = found[:limit]
    return TrialPage(
        trials=[trial_read(trial) for trial in page],
        next_cursor=write_cursor(page[-1].number) if len(found) > limit else None,
    )


@router.get("/trials/{trial_id}")
def read_trial(trial_id: Annotated[TrialId, Path()], store: StoreDep) -> TrialDetailRead:
    """Read a trial with its iterations, environment, log tail and attempts."""
    return trial_detail_read(store.trial_detail(trial_id))


@router.get(
    "/campaigns/{campaign}/leaderboard",
    response_model=LeaderboardPage,
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}, **UNCHANGED},
)
def read_leaderboard(
    campaign: CampaignDep,
    store: StoreDep,
    tag: CampaignTag,
    objective: Annotated[
        Objective | None, Query(description="What to rank by; the campaign's own by default.")
    ] = None,
    front: Annotated[
        bool, Query(description="Only the Pareto front over the campaign's objectives.")
    ] = False,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    offset: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
    format: Annotated[  # noqa: A002 - the parameter's name in the URL
        Literal["json", "csv"],
        Query(description="csv is the measurement-table format."),
    ] = "json",
    intervals: Annotated[
        bool, Query(description="In csv: also how often each was measured, and how sure it is.")
    ] = False,
) -> LeaderboardPage | Response:
    """Rank the layouts that a campaign measured, the best first, each with a 95 % interval.

    Repeats of a layout count together, by the median of their step times; its first trial stands for it.
    Oversubscribed ones are never ranked, nor are those that break the campaign's constraints.
    """
    ranked_by = objective or campaign.objective
    on_front = store.front(campaign)
    found = store.standings(
        campaign.id, ranked_by, listing=Listing(front=front), limit=limit, offset=offset
    )
    source = store.import_source(campaign.id)
    if format == "csv":
        table = measurement_table(campaign, found, source=source, intervals=intervals)
        return Response(table, media_type="text/csv", headers=tag_headers(tag))
    total = len(on_front) if front else store.count_ranked(campaign.id)
    end = offset + len(found)
    return LeaderboardPage(
        objective=ranked_by,
        objectives=list(campaign.objectives),
        source=source,
        total=total,
        constrained=store.count_constrained(campaign.id),
        trials=ranked_trials(campaign, found, after=offset, ranked_by=ranked_by, front=on_front),
        next_offset=end if found and end < total else None,
    )

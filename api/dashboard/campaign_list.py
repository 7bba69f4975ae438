"""The first page: the campaigns, with their progress and their best layouts."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Query, Request
from fastapi.responses import HTMLResponse

from layout_tuner.api.campaigns.progress_and_waiting import trials_planned
from layout_tuner.api.dependencies import StoreDep
from layout_tuner.api.html.rendering import render
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.schemas.text_types import QueryText
from layout_tuner.documents.limits import MAX_ID
from layout_tuner.results_db.campaigns.filter import EVERY_CAMPAIGN, CampaignFilter
from layout_tuner.results_db.records import CampaignRecord, CampaignState, Visibility
from layout_tuner.results_db.store import Store

PAGE: Final = 50
"""Campaigns on one page."""

router = LazyRouter()


@router.get("/")
def show_campaigns(
    request: Request,
    store: StoreDep,
    state: Annotated[list[CampaignState] | None, Query()] = None,
    created_by: QueryText | None = None,
    visibility: Visibility | None = None,
    model: QueryText | None = None,
    cluster: QueryText | None = None,
    name_contains: QueryText | None = None,
    offset: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
) -> HTMLResponse:
    """The campaigns that pass all filters, the newest first."""
    chosen = CampaignFilter(
        states=tuple(state or ()),
        model=model,
        cluster=cluster,
        created_by=created_by,
        visibility=visibility,
        name_contains=name_contains,
    )
    campaigns = store.campaigns.find(chosen=chosen, limit=PAGE, offset=offset)
    return render(
        request,
        "campaigns.html",
        rows=_rows(store, campaigns),
        total=store.reports.count_campaigns(chosen),
        choices=store.reports.campaign_choices(),
        chosen=chosen,
        is_filtered=chosen != EVERY_CAMPAIGN,
        offset=offset,
        page_size=PAGE,
    )


def _rows(store: Store, campaigns: list[CampaignRecord]) -> list[dict[str, Any]]:
    ids = [campaign.id for campaign in campaigns]
    counts, winners = store.campaigns.count_trials_of(ids), store.leaderboard.winners(ids)
    baselines = store.baselines.of_campaigns(campaigns)
    return [
        {
            "campaign": campaign,
            "counts": (of := counts[campaign.id]),
            "ended": of["COMPLETED"] + of["INFEASIBLE"] + of["FAILED"],
            "failed": of["INFEASIBLE"] + of["FAILED"],
            "planned": trials_planned(campaign, of, baselines.get(campaign.id)),
            "winner": winners.get(campaign.id),
        }
        for campaign in campaigns
    ]

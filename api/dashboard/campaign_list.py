"""The first page: the campaigns."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from api.dashboard.rendering import render
from api.dependencies import StoreDep

router = APIRouter()


@router.get("/", include_in_schema=False)
def show_campaigns(request: Request, store: StoreDep) -> HTMLResponse:
    """The campaigns, the newest first."""
    campaigns = store.campaigns(limit=50)
    winners = store.winners([campaign.id for campaign in campaigns])
    return render(request, "campaigns.html", campaigns=campaigns, winners=winners)

"""What all pages of one campaign show: its head, its tabs, and what the reader may do."""

from __future__ import annotations

from typing import Any, Final

from fastapi import Request
from fastapi.responses import HTMLResponse

from api.campaigns.progress import progress_of
from api.html.rendering import campaign_path, render
from results_db.records import CampaignRecord
from results_db.store import Store

TABS: Final = (
    ("Leaderboard", ""),
    ("Plots", "/plots"),
    ("Timeline", "/timeline"),
    ("Trials", "/trials"),
    ("Failures", "/failures"),
    ("Events", "/events"),
)
"""Names of the tabs with the ends of their paths."""


def render_campaign(
    request: Request, store: Store, campaign: CampaignRecord, template: str, **context: Any
) -> HTMLResponse:
    """A page of a campaign: a template that extends campaign_base.html.

    Args:
        request: the request that the page answers.
        store: the store.
        campaign: the campaign.
        template: a file of `api/html/templates`.
        context: variables of the template, besides those of `render`.
    """
    baselines = store.baselines.of_campaigns([campaign])
    return render(
        request,
        template,
        campaign=campaign,
        base=campaign_path(campaign),
        tabs=TABS,
        progress=progress_of(store, [campaign], baselines, store.now())[campaign.id],
        baseline=baselines.get(campaign.id),
        budget=campaign.spec.get("budget", {}),
        may_change=request.state.holder.may_change(campaign),
        **context,
    )

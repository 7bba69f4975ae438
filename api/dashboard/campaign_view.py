"""What all pages of one campaign show: its head, its tabs, and what the reader may do."""

from __future__ import annotations

import re
from typing import Any, Final

from fastapi import Request
from fastapi.responses import HTMLResponse

from api.dashboard.rendering import render
from api.security.token_cache import Holder
from api.service.progress import progress_of
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

_NAME_IN_PATHS: Final = re.compile(r"(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]*")


def campaign_path(campaign: CampaignRecord) -> str:
    """The path of a campaign's page, with its name.

    Names of old campaigns may have any characters; such a campaign is named by its id.
    """
    named = campaign.name if _NAME_IN_PATHS.fullmatch(campaign.name) else campaign.id
    return f"/campaigns/{named}"


def may_change(holder: Holder | None, campaign: CampaignRecord) -> bool:
    """Whether the reader may change a campaign: its owner and admins may."""
    if holder is None or holder.role not in ("submitter", "admin"):
        return False
    return holder.role == "admin" or campaign.created_by == holder.name


def render_campaign(
    request: Request, store: Store, campaign: CampaignRecord, template: str, **context: Any
) -> HTMLResponse:
    """A page of a campaign: a template that extends campaign_base.html.

    Args:
        request: the request that the page answers.
        store: the store.
        campaign: the campaign.
        template: a file of `api/dashboard/templates`.
        context: variables of the template, besides those of `render`.
    """
    holder = getattr(request.state, "holder", None)
    baselines = store.baselines([campaign])
    return render(
        request,
        template,
        campaign=campaign,
        base=campaign_path(campaign),
        tabs=TABS,
        progress=progress_of(store, [campaign], baselines, store.now())[campaign.id],
        baseline=baselines.get(campaign.id),
        budget=campaign.spec.get("budget", {}),
        may_change=may_change(holder, campaign),
        may_submit=holder is not None and holder.role in ("submitter", "admin"),
        **context,
    )

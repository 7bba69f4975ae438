"""Reports: a campaign as one document to mail or print."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from api.dependencies import CampaignDep, StoreDep
from api.report.document import POLICY, report

router = APIRouter(prefix="/v1/campaigns", tags=["campaigns"])


@router.get("/{campaign}/report", response_class=HTMLResponse)
def read_report(campaign: CampaignDep, store: StoreDep) -> HTMLResponse:
    """Read a campaign's report: one HTML document that loads nothing and runs nothing.

    Of a campaign that has not ended it shows what there is so far.
    """
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Content-Disposition": f'inline; filename="{campaign.name}.html"',
    }
    return HTMLResponse(report(store, campaign, store.now()), headers=headers)

"""All pages of the dashboard, and how the application gets them."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Depends

from layout_tuner.api.dashboard import (
    access_pages,
    allocation_list,
    campaign_actions,
    campaign_list,
    campaign_page,
    campaign_tabs,
    comparisons,
    export_page,
    job_upload,
    plot_pages,
    sign_in_page,
    submit,
    trainer_page,
    trial_page,
    usage_page,
)
from layout_tuner.api.html import assets
from layout_tuner.api.http.query_parameters import refuse_unknown_query_of_page
from layout_tuner.api.security.access_check import check_again

_PAGES: Final = (
    campaign_list,
    campaign_page,
    campaign_tabs,
    campaign_actions,
    comparisons,
    trial_page,
    trainer_page,
    plot_pages,
    submit,
    job_upload,
    export_page,
    allocation_list,
    access_pages,
    usage_page,
)
"""Modules with a `router` of pages; each route has a line in `api.security.roles.ACCESS`."""


def router() -> APIRouter:
    """The routes of all pages and of their files."""
    found = APIRouter(include_in_schema=False)
    checks = [Depends(check_again), Depends(refuse_unknown_query_of_page)]
    for module in _PAGES:
        found.include_router(module.router, dependencies=checks)
    # The sign-in page reads its parameters itself: whoever opens it is not known yet.
    found.include_router(sign_in_page.router, dependencies=[Depends(check_again)])
    found.include_router(assets.router)
    return found

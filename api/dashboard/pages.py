"""All pages of the dashboard, and how the application gets them."""

from __future__ import annotations

from typing import Final

from starlette.routing import BaseRoute

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
from layout_tuner.api.http.lazy_routes import with_checks
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


def routes() -> list[BaseRoute]:
    """The routes of all pages and of their files."""
    of_pages = (module.router for module in _PAGES)
    return [
        *with_checks(of_pages, check_again, refuse_unknown_query_of_page, include_in_schema=False),
        # The sign-in page reads its parameters itself: whoever opens it is not known yet.
        *with_checks((sign_in_page.router,), check_again, include_in_schema=False),
        *with_checks((assets.router,), include_in_schema=False),
    ]

"""All pages of the dashboard, and how the application gets them."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Depends, Query

from api.dashboard import (
    access_pages,
    allocation_list,
    assets,
    campaign_actions,
    campaign_comparison,
    campaign_list,
    campaign_page,
    campaign_tabs,
    export_page,
    sign_in,
    submit,
)
from api.http.query_parameters import refuse_unknown_query
from api.security.gate import judged

_PAGES: Final = (
    campaign_list,
    campaign_comparison,
    campaign_page,
    campaign_tabs,
    campaign_actions,
    submit,
    export_page,
    allocation_list,
    access_pages,
)
"""Modules with a `router` of pages; each route has a line in `api.security.roles.ACCESS`."""


def router() -> APIRouter:
    """The routes of all pages and of their files."""
    found = APIRouter()
    checks = [Depends(judged), Depends(take_done), Depends(refuse_unknown_query)]
    for module in _PAGES:
        found.include_router(module.router, dependencies=checks)
    # The sign-in page reads its parameters itself: whoever opens it is not known yet.
    found.include_router(sign_in.router, dependencies=[Depends(judged)])
    found.include_router(assets.router)
    return found


async def take_done(done: Annotated[str | None, Query(max_length=40)] = None) -> None:
    """Every page may have the parameter `done`: the code of what the last form did.

    Templates have a sentence for each code that they know, and ignore others.
    """

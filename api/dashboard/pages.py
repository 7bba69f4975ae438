"""All pages of the dashboard, and how the application gets them."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Depends

from api.dashboard import assets, campaign_list, plots
from api.security.gate import judged

_PAGES: Final = (campaign_list, plots)
"""Modules with a `router` of pages; each route has a line in `api.security.roles.ACCESS`."""


def router() -> APIRouter:
    """The routes of all pages and of their files."""
    found = APIRouter()
    for module in _PAGES:
        found.include_router(module.router, dependencies=[Depends(judged)])
    found.include_router(assets.router)
    return found

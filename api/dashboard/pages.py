"""All pages of the dashboard, and how the application gets them."""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Depends

from api.dashboard import (
    access_pages,
    allocation_list,
    assets,
    campaign_list,
    export_page,
    submit,
)
from api.security.gate import judged

_PAGES: Final = (campaign_list, submit, export_page, allocation_list, access_pages)
"""Modules with a `router` of pages; each route has a line in `api.security.roles.ACCESS`."""


def router() -> APIRouter:
    """The routes of all pages and of their files."""
    found = APIRouter()
    for module in _PAGES:
        found.include_router(module.router, dependencies=[Depends(judged)])
    found.include_router(assets.router)
    return found

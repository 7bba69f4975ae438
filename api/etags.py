"""Entity tags: who polls a page is answered 304, before anything is computed, while it has not changed.

A tag follows from the campaign's events, so a page may have one if whatever it shows comes with an
event. It is taken before the page is read: a change in between makes the page newer than its tag, and
the next poll reads it again.
"""

from __future__ import annotations

import hashlib
import re
from http import HTTPStatus
from typing import Annotated, Final

from fastapi import Depends, FastAPI, Request, Response

from api.dependencies import CampaignDep, StoreDep
from api.version import version
from results_db.records import CampaignRecord
from results_db.store import Store

_TAG: Final = re.compile(r'(?:W/)?"([^"]*)"')


class PageUnchanged(Exception):  # noqa: N818 - it is no error
    """The client has the page as it is."""

    def __init__(self, tag: str) -> None:
        super().__init__(tag)
        self.tag = tag


def campaign_tag(
    campaign: CampaignDep, store: StoreDep, request: Request, response: Response
) -> str:
    """The tag of a page of the campaign, which goes into its headers.

    A route that makes its own `Response` puts `tag_headers` there itself.

    Raises:
        PageUnchanged: the client has this page.
    """
    return _tag(request, response, store, campaign, beats=False)


def live_campaign_tag(
    campaign: CampaignDep, store: StoreDep, request: Request, response: Response
) -> str:
    """As `campaign_tag`, of a page that shows the progress of running trials too."""
    return _tag(request, response, store, campaign, beats=True)


CampaignTag = Annotated[str, Depends(campaign_tag)]
LiveCampaignTag = Annotated[str, Depends(live_campaign_tag)]


def _tag(
    request: Request, response: Response, store: Store, campaign: CampaignRecord, *, beats: bool
) -> str:
    page = f"{request.url.path}?{request.url.query} {request.headers.get('accept', '')}"
    mark = store.campaign_mark(campaign.id, beats=beats)
    text = f"{version()} {campaign.id} {page} {mark}"
    tag = f'W/"{hashlib.sha256(text.encode()).hexdigest()[:32]}"'
    if _has_it(request, tag):
        raise PageUnchanged(tag)
    response.headers.update(tag_headers(tag))
    return tag


def tag_headers(tag: str) -> dict[str, str]:
    """The headers of a page with this tag; clients keep it and ask whether it still stands."""
    return {"ETag": tag, "Cache-Control": "private, no-cache", "Vary": "Accept, Authorization"}


def _has_it(request: Request, tag: str) -> bool:
    given = ", ".join(request.headers.getlist("if-none-match"))
    if given.strip() == "*":
        return True
    opaque = _TAG.fullmatch(tag)
    assert opaque is not None
    return opaque[1] in _TAG.findall(given)


def _unchanged(_request: Request, unchanged: Exception) -> Response:
    assert isinstance(unchanged, PageUnchanged)
    return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=tag_headers(unchanged.tag))


def install(app: FastAPI) -> None:
    """Makes the application answer 304."""
    app.add_exception_handler(PageUnchanged, _unchanged)

"""Entity tags: who polls a page is answered 304, before anything is computed, while it has not changed.

A tag follows from the campaign's events, so a page may have one if whatever it shows comes with an
event. It is taken before the page is read: a change in between makes the page newer than its tag, and
the next poll reads it again.
"""

from __future__ import annotations

import hashlib
import re
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Header, Request, Response

from api.dependencies import CampaignDep, StoreDep
from api.version import version

UNCHANGED: Final[dict[int | str, dict[str, Any]]] = {
    HTTPStatus.NOT_MODIFIED: {"description": "The page is as it was; see `If-None-Match`"}
}
"""For the `responses` of a route that has a tag."""

IfNoneMatch = Annotated[
    str | None,
    Header(description="The ETag of the page that the client has; 304 if it still stands."),
]

_TAG: Final = re.compile(r'(?:W/)?"([^"]*)"')


class PageUnchanged(Exception):  # noqa: N818 - it is no error
    """The client has the page as it is."""

    def __init__(self, tag: str) -> None:
        super().__init__(tag)
        self.tag = tag


def campaign_tag(
    campaign: CampaignDep,
    store: StoreDep,
    request: Request,
    response: Response,
    if_none_match: IfNoneMatch = None,
) -> str:
    """The tag of a page of the campaign, which goes into its headers.

    A route that makes its own `Response` puts `tag_headers` there itself.

    Raises:
        PageUnchanged: the client has this page.
    """
    tag = tag_of(request, store.campaign_mark(campaign.id), if_none_match)
    response.headers.update(tag_headers(tag))
    return tag


def live_campaign_tag(
    campaign: CampaignDep,
    store: StoreDep,
    request: Request,
    response: Response,
    if_none_match: IfNoneMatch = None,
) -> str:
    """As `campaign_tag`, of a page that shows the progress of running trials too."""
    tag = tag_of(request, store.campaign_mark(campaign.id, beats=True), if_none_match)
    response.headers.update(tag_headers(tag))
    return tag


CampaignTag = Annotated[str, Depends(campaign_tag)]
LiveCampaignTag = Annotated[str, Depends(live_campaign_tag)]


def tag_of(request: Request, mark: str, if_none_match: str | None) -> str:
    """The tag of a page of a campaign at `Store.campaign_mark`.

    Raises:
        PageUnchanged: the client has this page.
    """
    page = f"{request.url.path}?{request.url.query} {request.headers.get('accept', '')}"
    opaque = hashlib.sha256(f"{version()} {page} {mark}".encode()).hexdigest()[:32]
    tag = f'W/"{opaque}"'
    given = (if_none_match or "").strip()
    if given == "*" or opaque in _TAG.findall(given):
        raise PageUnchanged(tag)
    return tag


def tag_headers(tag: str) -> dict[str, str]:
    """The headers of a page with this tag; clients keep it and ask whether it still stands."""
    return {"ETag": tag, "Cache-Control": "private, no-cache", "Vary": "Accept, Authorization"}


def _unchanged(_request: Request, unchanged: Exception) -> Response:
    assert isinstance(unchanged, PageUnchanged)
    return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=tag_headers(unchanged.tag))


def install(app: FastAPI) -> None:
    """Makes the application answer 304."""
    app.add_exception_handler(PageUnchanged, _unchanged)

"""Entity tags: a poll of a page that has not changed is answered 304.

The tag of a campaign's pages is computed from their version (`store.events.page_version`) before
the page is read: an unchanged page is not computed, and after a change in between, the page is
newer than its tag, and the next poll reads it again. The tag of a list is computed from the list
itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Header, Request, Response
from pydantic import BaseModel

from api.dependencies import CampaignDep, StoreDep
from api.version import version

UNCHANGED: Final[dict[int | str, dict[str, Any]]] = {
    HTTPStatus.NOT_MODIFIED: {"description": "The page is as it was; see `If-None-Match`"}
}
"""The `responses` of a route that has a tag."""

IfNoneMatch = Annotated[
    str | None,
    Header(description="The ETag of the page that the client has; 304 if it is unchanged."),
]

_TAG: Final = re.compile(r'(?:W/)?"([^"]*)"')


class PageUnchanged(Exception):  # noqa: N818 - not an error
    """The client has the current page."""

    def __init__(self, tag: str) -> None:
        super().__init__(tag)
        self.tag = tag


def live_campaign_tag(
    campaign: CampaignDep,
    store: StoreDep,
    request: Request,
    response: Response,
    if_none_match: IfNoneMatch = None,
) -> None:
    """Adds the tag of a page that shows a campaign and the progress of its running trials.

    Raises:
        PageUnchanged: the client has this page.
    """
    mark = store.events.page_version(campaign.id, beats=True)
    response.headers.update(tag_headers(tag_of(request, mark, if_none_match)))


TagDocument = Callable[[BaseModel], None]
"""Adds the tag of a document, before a route returns it."""


def document_tag(
    request: Request, response: Response, if_none_match: IfNoneMatch = None
) -> TagDocument:
    """The tag of a list of campaigns, allocations or nodes, which follows from its content.

    The function that it returns raises `PageUnchanged` if the client has this list.
    """

    def add_tag(document: BaseModel) -> None:
        tag = tag_of(request, document.model_dump_json(), if_none_match)
        response.headers.update(tag_headers(tag))

    return add_tag


TagDocumentDep = Annotated[TagDocument, Depends(document_tag)]
LIVE_CAMPAIGN_TAG: Final = Depends(live_campaign_tag)
"""For the `dependencies` of routes; those that make a `Response` add `tag_headers` themselves."""


def tag_of(request: Request, mark: str, if_none_match: str | None) -> str:
    """The tag of a page whose version is `mark`.

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
    """The headers of a page with this tag; clients keep the page and revalidate it."""
    return {
        "ETag": tag,
        "Cache-Control": "private, no-cache",
        "Vary": "Accept, Authorization, Cookie",
    }


def _unchanged(_request: Request, unchanged: Exception) -> Response:
    assert isinstance(unchanged, PageUnchanged)
    return Response(status_code=HTTPStatus.NOT_MODIFIED, headers=tag_headers(unchanged.tag))


def install(app: FastAPI) -> None:
    """Makes the application answer 304 to `PageUnchanged`."""
    app.add_exception_handler(PageUnchanged, _unchanged)

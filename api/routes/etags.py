"""Entity tags: a poll of a page that has not changed is answered 304.

The version of a campaign's pages (`store.events.page_version`) is read before the page: an
unchanged page is not computed, and after a change in between, the page is newer than its tag, and
the next poll reads it again. The version of a list is the list itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Header, Request, Response

from layout_tuner.version import version

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


TagPage = Callable[[str], Mapping[str, str]]
"""Adds the tag of a page with this version; returns it as headers, for routes that make a response.

It raises `PageUnchanged` if the client has this page.
"""


async def page_tag(
    request: Request, response: Response, if_none_match: IfNoneMatch = None
) -> TagPage:
    """The tag of the page that a route answers with."""

    def add_tag(version: str) -> Mapping[str, str]:
        headers = tag_headers(tag_of(request, version, if_none_match))
        response.headers.update(headers)
        return headers

    return add_tag


TagDep = Annotated[TagPage, Depends(page_tag)]


def tag_of(request: Request, mark: str, if_none_match: str | None) -> str:
    """The tag of a page whose version is `mark`; PageUnchanged if the client has it."""
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

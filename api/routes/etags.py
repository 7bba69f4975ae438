"""Entity tags: a poll of a page that has not changed is answered 304 before anything is computed.

A tag is computed from a version in the database (`Store.page_version` of a campaign's pages,
`results_db.events.list_versions` of lists), so only a page whose every change gives another version
may have one. The tag is computed before the page is read: after a change in between, the page is
newer than its tag, and the next poll reads it again.
"""

from __future__ import annotations

import hashlib
import re
from http import HTTPStatus
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Header, Request, Response

from api.campaigns.progress import driver_is_alive
from api.dependencies import CampaignDep, StoreDep
from api.version import version
from results_db.store import Store

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
    mark = store.page_version(campaign.id, beats=True)
    response.headers.update(tag_headers(tag_of(request, mark, if_none_match)))


def campaign_list_tag(
    store: StoreDep, request: Request, response: Response, if_none_match: IfNoneMatch = None
) -> None:
    """Adds the tag of a list of campaigns, which says of open ones why they wait.

    Raises:
        PageUnchanged: the client has this page.
    """
    has_driver = driver_is_alive(store.driver_seen_at(), store.now())
    versions = (store.campaigns_version(beats=True), store.nodes_version(), _time_of_ends(store))
    mark = f"{versions} {has_driver}"
    response.headers.update(tag_headers(tag_of(request, mark, if_none_match)))


def node_list_tag(
    store: StoreDep, request: Request, response: Response, if_none_match: IfNoneMatch = None
) -> None:
    """Adds the tag of a list of allocations or of nodes.

    Raises:
        PageUnchanged: the client has this page.
    """
    mark = f"{store.nodes_version(beats=True)} {_time_of_ends(store)}"
    response.headers.update(tag_headers(tag_of(request, mark, if_none_match)))


def _time_of_ends(store: Store) -> int | None:
    """A number that changes every second while an allocation comes closer to its end.

    Lists show the seconds until then, and trials that take longer wait. None: no allocation ends.
    """
    if all(worker.ends_at is None for worker in store.workers()):
        return None
    return int(store.now().timestamp())


LIVE_CAMPAIGN_TAG: Final = Depends(live_campaign_tag)
CAMPAIGN_LIST_TAG: Final = Depends(campaign_list_tag)
NODE_LIST_TAG: Final = Depends(node_list_tag)
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

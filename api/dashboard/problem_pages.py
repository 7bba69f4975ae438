"""Problems as pages: what a browser shows where the API answers with a problem document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layout_tuner.api.html.rendering import render
from layout_tuner.api.http.error_responses import MEDIA_TYPE
from layout_tuner.api.http.url_prefix import route_path
from layout_tuner.api.security.authentication import is_api

_TITLES: Final[Mapping[int, str]] = {
    401: "Sign in first",
    403: "You may not do this",
    404: "There is no such page",
    405: "This is not possible here",
    409: "This is not possible now",
    413: "This is too large",
    422: "The request cannot be understood",
    429: "Too many requests",
    500: "The service has made a mistake",
    503: "The service cannot answer now",
}

_KEPT: Final = ("retry-after", "www-authenticate", "allow", "connection", "set-cookie")
"""Headers of a problem document that its page has too."""


class ProblemPages:
    """Middleware that answers a browser's navigation with a page instead of a problem document.

    The API below /v1 and requests that do not accept HTML get the document.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_page = scope["type"] == "http" and not is_api(scope)
        if not is_page or "text/html" not in Headers(scope=scope).get("accept", ""):
            await self._app(scope, receive, send)
            return
        # Forms send parameters that nobody filled in.
        pairs = scope["query_string"].split(b"&")
        scope["query_string"] = b"&".join(pair for pair in pairs if not pair.endswith(b"="))
        start: Message | None = None
        body = b""

        async def turned(message: Message) -> None:
            nonlocal start, body
            kind = Headers(raw=message.get("headers", ())).get("content-type", "")
            if message["type"] == "http.response.start" and kind.startswith(MEDIA_TYPE):
                start = message
            elif start is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    page = _page(Request(scope), start, json.loads(body))
                    await page(scope, receive, send)

        await self._app(scope, receive, turned)


def _page(request: Request, start: Message, problem: Mapping[str, Any]) -> Any:
    status = HTTPStatus(start["status"])
    path = route_path(request.scope)
    page = render(
        request,
        "problem.html",
        status=status,
        title=_TITLES.get(status, status.phrase),
        detail=problem["detail"],
        parent=(path.rpartition("/")[0] or "/")
        if request.method == "POST" or status == HTTPStatus.NOT_FOUND
        else path,
    )
    page.headers["Cache-Control"] = "no-store"
    for name, value in Headers(raw=start["headers"]).items():
        if name in _KEPT:
            page.headers[name] = value
    return page

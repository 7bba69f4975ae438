"""Problem documents as pages, for a person who opens a page or sends a form without a script."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Final

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.dashboard.rendering import render
from api.http.problems import MEDIA_TYPE
from api.security.authentication import is_api

_OF_DOCUMENT: Final = (b"content-type", b"content-length")
"""Headers that the page does not take over."""


class ProblemPages:
    """Middleware that answers a navigation with a page where the answer is a problem document.

    Scripts get the document: they ask with another Sec-Fetch-Mode.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_navigation(scope):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        body = b""

        async def held(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                kind = Headers(raw=message["headers"]).get("content-type", "")
                if kind.startswith(MEDIA_TYPE):
                    start = message
                    return
            if start is None:
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                await _send_page(scope, receive, send, start, body)

        await self._app(scope, receive, held)


def _is_navigation(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    mode = headers.get("sec-fetch-mode", "navigate")
    return mode == "navigate" and "text/html" in headers.get("accept", "") and not is_api(scope)


async def _send_page(
    scope: Scope, receive: Receive, send: Send, start: Message, body: bytes
) -> None:
    problem = json.loads(body)
    status = HTTPStatus(start["status"])
    page = render(
        Request(scope),
        "problem.html",
        status=status,
        title=problem["title"],
        detail=problem["detail"],
        may_sign_in=status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN),
    )
    page.headers["Cache-Control"] = "no-store"
    page.raw_headers += [each for each in start["headers"] if each[0] not in _OF_DOCUMENT]
    await page(scope, receive, send)

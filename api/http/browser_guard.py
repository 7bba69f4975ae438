"""Protection against pages of other sites in a browser: checks of Host and Origin, safe headers."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.http.problems import problem_response
from search_spaces.connection.service_address import is_loopback_host

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::\d{1,5})?")

ANSWER_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
"""Added to every response that lacks them; the few pages of the service set their own."""


class BrowserGuard:
    """Middleware that refuses requests of other sites' pages and adds `ANSWER_HEADERS`."""

    def __init__(self, app: ASGIApp, *, local_hosts_only: bool, is_behind_proxy: bool) -> None:
        self._app = app
        self._local_hosts_only = local_hosts_only
        self._checks_origin = not is_behind_proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in ANSWER_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refusal = self._refusal(Headers(scope=scope))
        await (refusal or self._app)(scope, receive, marked)

    def _refusal(self, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        if self._local_hosts_only and not is_local(host):
            return problem_response(
                HTTPStatus.MISDIRECTED_REQUEST,
                f"this service listens on this machine alone and is not {host[:80]!r}; ask for localhost, "
                "or start it with --behind-proxy where a proxy stands before it",
            )
        origin = headers.get("origin")
        if self._checks_origin and origin is not None and origin.partition("://")[2] != host:
            return problem_response(
                HTTPStatus.FORBIDDEN, f"a page of {origin[:80]!r} may not use this service"
            )
        return None


def is_local(host: str) -> bool:
    """Whether a Host header is a loopback address or name."""
    found = _HOST.fullmatch(host)
    return found is not None and is_loopback_host(found[1])

"""What keeps browsers from being used against the service: whose page asks, and what its answers may do."""

from __future__ import annotations

import ipaddress
import re
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.problems import problem_response

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::\d{1,5})?")

ANSWER_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
}
"""On every answer that does not state its own: nothing of ours is a page, but for those that say so."""


class BrowserGuard:
    """Refuses requests that a page from elsewhere makes, and says what answers may do."""

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
    """Whether a Host header names this machine as only this machine can: by a loopback address or name."""
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = found[1].strip("[]").lower().rstrip(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False

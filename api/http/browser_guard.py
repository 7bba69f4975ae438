"""Protection against pages of other sites in a browser: checks of Host and Origin, safe headers."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layout_tuner.api.http.error_responses import problem_response
from layout_tuner.documents.hosts import is_loopback_host

_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::\d{1,5})?")

ANSWER_HEADERS: Final = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
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
        found = _HOST.fullmatch(host)
        if self._local_hosts_only and not (found and is_loopback_host(found[1])):
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


def browser_host(headers: Headers, is_behind_proxy: bool) -> str:
    """The host, with its port, that the browser has in its address bar.

    A proxy may use another Host header, and states the browser's in X-Forwarded-Host. No page can
    make a browser send X-Forwarded-Host to another origin.
    """
    forwarded = headers.get("x-forwarded-host") if is_behind_proxy else None
    if forwarded:
        return forwarded.partition(",")[0].strip()
    return headers.get("host", "")


def browser_scheme(scope: Scope, is_behind_proxy: bool) -> str:
    """The scheme of the browser's address: "https", or "http".

    A proxy encrypts, and may not state so in X-Forwarded-Proto; the Origin of a page does.
    """
    headers = Headers(scope=scope)
    if not is_behind_proxy or scope["scheme"] == "https":
        return str(scope["scheme"])
    stated = headers.get("origin", "").partition("://")[0]
    return stated or ("http" if "x-forwarded-proto" in headers else "https")


def why_foreign(headers: Headers, is_behind_proxy: bool) -> str | None:
    """Why a request that changes something is not one of this service's own pages; None: it is.

    Both headers are written by the browser, and a page cannot change them. Browsers send Origin
    with every POST, and Sec-Fetch-Site over TLS and to loopback.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is None and origin is None:
        return "the browser does not say which page sends this (neither Sec-Fetch-Site nor Origin)"
    if site is not None and site != "same-origin":
        return f"another site's page sends this (Sec-Fetch-Site: {site[:40]!r})"
    if origin is None:
        return None
    host = browser_host(headers, is_behind_proxy)
    if origin.partition("://")[2] == host:
        return None
    advice = "; let the proxy pass on Host or X-Forwarded-Host" if is_behind_proxy else ""
    return f"a page of {origin[:80]!r} sends this, and the service is {host[:80]!r}{advice}"

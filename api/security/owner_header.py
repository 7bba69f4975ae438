"""The owner whom a trusted proxy names in a header of each request.

The header is read before uvicorn puts the client's address in the place of the proxy's. From any
other sender it is refused, not ignored: with a proxy that is missing in --proxy it would look as if
nobody had signed in, and who tries to pass for somebody else would leave no trace.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from layout_tuner.api.http.error_responses import problem_response

_KEY: Final = "layout_tuner.proxied_owner"


class ProxiedOwner(NamedTuple):
    """The owner whom the proxy names, and the groups; None: the request does not state them."""

    owner: str
    groups: tuple[str, ...] | None


class OwnerHeader:
    """Middleware around uvicorn's for proxies: notes the owner whom the proxy names."""

    def __init__(
        self,
        app: ASGIApp,
        header: str,
        groups_header: str,
        proxies: Sequence[str],
        refused: Callable[[str, str], Awaitable[None]],
    ) -> None:
        """`refused` gets the sender's address and the reason of a refusal."""
        self._app: Any = ProxyHeadersMiddleware(app, list(proxies))  # type: ignore[arg-type]
        self._header, self._groups_header, self._refused = header, groups_header, refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if named := headers.getlist(self._header):
            sender = scope["client"][0] if scope.get("client") else ""
            groups = headers.getlist(self._groups_header) if self._groups_header else []
            if sender not in self._app.trusted_hosts or len(named) > 1 or len(groups) > 1:
                why = f"only the proxy may send {self._header}, each header once; {sender} is none of --proxy, or sent it twice"
                await self._refused(sender, why)
                await problem_response(HTTPStatus.FORBIDDEN, why)(scope, receive, send)
                return
            words = tuple(filter(None, map(str.strip, ",".join(groups).split(","))))
            scope[_KEY] = ProxiedOwner(named[0].strip(), words if groups else None)
        await self._app(scope, receive, send)


def proxied_owner(scope: Scope) -> ProxiedOwner | None:
    """Whom the proxy names in a request; None: nobody."""
    found: ProxiedOwner | None = scope.get(_KEY)
    return found if found is not None and found.owner else None

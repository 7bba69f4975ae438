"""The operation that a request asks for, found before its headers and body are read.

HEAD runs as GET.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from fastapi.routing import iter_route_contexts
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from layout_tuner.api.http.url_prefix import route_path

_FOUND: Final = "layout_tuner.asked"
"""Key of a request's scope, under which `RouteMap.asked` keeps its result."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An operation, and the parameters in its path."""

    operation: str
    path_parameters: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RouteMap:
    """The routes of an application in its order; the first that matches answers a request."""

    _by_method: Mapping[str, Sequence[tuple[re.Pattern[str], str]]]
    operations: frozenset[str]
    """The names of all routes and mounts."""

    @classmethod
    def of(cls, routes: Sequence[BaseRoute]) -> Self:
        by_method: dict[str, list[tuple[re.Pattern[str], str]]] = {}
        operations = set()
        for route in iter_route_contexts(routes):
            name = str(route.name)
            operations.add(name)
            for method in route.methods or ():
                by_method.setdefault(method, []).append((route.path_regex, name))
        return cls(by_method, frozenset(operations))

    def asked(self, scope: Scope) -> Asked | None:
        """The operation of a request; None: no route matches, or a mount.

        It is found once for each request, whichever middleware needs it first.
        """
        if _FOUND not in scope:
            scope[_FOUND] = self._find(scope["method"], route_path(scope))
        found: Asked | None = scope[_FOUND]
        return found

    def methods(self, path: str) -> list[str]:
        found = {method for method in self._by_method if self._find(method, path) is not None}
        return sorted(found | ({"HEAD"} if "GET" in found else set()))

    def _find(self, method: str, path: str) -> Asked | None:
        for regex, operation in self._by_method.get(method, ()):
            if found := regex.match(path):
                return Asked(operation, found.groupdict())
        return None


class HeadRequests:
    """Middleware that runs a HEAD request as its GET, and ends the answer after the headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def headers_alone(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                # At once, so that a stream of events sees a client that has gone.
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        # A copy: the server keeps its own scope, from which it knows that no body follows.
        await self._app({**scope, "method": "GET"}, receive, headers_alone)

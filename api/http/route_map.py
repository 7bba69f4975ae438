"""Paths of requests: the URL prefix of a proxy, and the operation that a path asks for.

The operation is found before headers and body are read. HEAD runs as GET.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from fastapi.routing import iter_route_contexts
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.errors import ServiceStartError

MAX_LENGTH: Final = 100

_PREFIX: Final = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*")
"""Segments without characters that a proxy, a cookie or a header could read differently."""

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


class UrlPrefix:
    """Middleware that gives every request the prefix, whether or not the proxy removed it.

    As ASGI has it, `path` begins with `root_path`. Routes are matched without the prefix
    (`route_path`), and links are made with `root_path`.
    """

    def __init__(self, app: ASGIApp, *, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            scope["root_path"] = self._prefix
            if path != self._prefix and not path.startswith(f"{self._prefix}/"):
                scope["path"] = self._prefix + path
        await self._app(scope, receive, send)


def route_path(scope: Scope) -> str:
    """The path of a request without the URL prefix, as the routes have it."""
    path: str = scope["path"]
    prefix: str = scope.get("root_path", "")
    if prefix and (path == prefix or path.startswith(f"{prefix}/")):
        return path[len(prefix) :]
    return path


def read_prefix(given: str) -> str:
    """The prefix that an option gives, such as "/tuner"; a slash at its end is dropped.

    Raises:
        ServiceStartError: it is not a path.
    """
    prefix = given.rstrip("/")
    if not _PREFIX.fullmatch(prefix) or len(prefix) > MAX_LENGTH:
        raise ServiceStartError(
            f"--url-prefix {given[:MAX_LENGTH]!r} is not a path: write it as /tuner, with letters, "
            f"digits and . _ ~ - between the slashes, and at most {MAX_LENGTH} characters"
        )
    return prefix


def refuse_taken_prefix(prefix: str, routes: Sequence[BaseRoute]) -> None:
    """Checks that no route begins as the prefix does.

    A proxy may remove the prefix: then nobody could tell a prefix from the beginning of a route.

    Raises:
        ServiceStartError: a route does.
    """
    paths = [str(route.path) for route in iter_route_contexts(routes)]
    taken = sorted({path.split("/")[1] for path in paths} - {""})
    if prefix.split("/")[1] in taken:
        raise ServiceStartError(
            f"--url-prefix {prefix!r} begins as pages of the service do: begin it with another word "
            f"than {', '.join(taken)}"
        )

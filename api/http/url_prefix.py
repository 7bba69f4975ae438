"""A URL prefix: the path below which a proxy shows the service to browsers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from layout_tuner.api.errors import ServiceStartError

if TYPE_CHECKING:  # `up` reads a prefix without them
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Receive, Scope, Send

MAX_LENGTH: Final = 100

_PREFIX: Final = re.compile(r"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*")
"""Segments without characters that a proxy, a cookie or a header could read differently."""


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

    Raises ServiceStartError if it is not a path.
    """
    prefix = given.rstrip("/")
    if not _PREFIX.fullmatch(prefix) or len(prefix) > MAX_LENGTH:
        raise ServiceStartError(
            f"--url-prefix {given[:MAX_LENGTH]!r} is not a path: write it as /tuner, with letters, "
            f"digits and . _ ~ - between the slashes, and at most {MAX_LENGTH} characters"
        )
    return prefix


def refuse_taken_prefix(prefix: str, routes: Sequence[BaseRoute]) -> None:
    """Raises ServiceStartError if a route begins as the prefix does.

    A proxy may remove the prefix: then nobody could tell a prefix from the beginning of a route.
    """
    from fastapi.routing import iter_route_contexts

    paths = [str(route.path) for route in iter_route_contexts(routes)]
    taken = sorted({path.split("/")[1] for path in paths} - {""})
    if prefix.split("/")[1] in taken:
        raise ServiceStartError(
            f"--url-prefix {prefix!r} begins as pages of the service do: begin it with another word "
            f"than {', '.join(taken)}"
        )

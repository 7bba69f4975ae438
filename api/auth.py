"""The bearer token is asked for everywhere under /v1, but for health."""

from __future__ import annotations

import hmac
from http import HTTPStatus
from typing import Final

from fastapi.security import HTTPBearer
from starlette.types import ASGIApp, Receive, Scope, Send

from api.problems import problem_response

OPEN_PATHS: Final = frozenset({"/v1/health"})
"""Paths under /v1 that need no token."""

bearer_scheme = HTTPBearer(
    auto_error=False,
    scheme_name="bearer",
    description="The token in the service's data directory; `layout-tuner up` prints it.",
)
"""For the OpenAPI document; `BearerGate` is what checks."""


class BearerGate:
    """Lets nothing under /v1 through without the token."""

    def __init__(self, app: ASGIApp, *, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_guarded(scope["path"]) or self._admits(scope):
            await self._app(scope, receive, send)
            return
        refusal = problem_response(
            HTTPStatus.UNAUTHORIZED,
            "the request carries no valid token: send the one in the service's token file as "
            '"Authorization: Bearer <token>"',
            headers={"WWW-Authenticate": 'Bearer realm="layout-tuner"'},
        )
        await refusal(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, given = value.partition(b" ")
                # In constant time: how much of a guess is right must not show.
                return scheme.lower() == b"bearer" and hmac.compare_digest(
                    given.strip(), self._token
                )
        return False


def _is_guarded(path: str) -> bool:
    return (path == "/v1" or path.startswith("/v1/")) and path not in OPEN_PATHS

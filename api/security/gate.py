"""The gate: the checks of every request, before its body is read.

In order: authentication (401), rate limit (429), role (403), ownership (403). A request that passes
carries its `Actor`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from fastapi import Request
from fastapi.security import HTTPBearer
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import AccessUndeclaredError
from api.http.problems import problem_response
from api.http.route_map import Asked, RouteMap
from api.security.ownership import Owners
from api.security.rate_limit import Throttle
from api.security.roles import ACCESS, OPEN, AccessRule
from api.security.stream_token_check import answer_while_valid
from api.security.token_cache import Holder, TokenBook
from api.security.token_guess_limit import Guesses
from results_db.access.actor import Actor, TokenRole
from results_db.access.tokens import hash_of_token
from results_db.errors import DatabaseUnavailableError

BURST_S: Final = 5.0
"""A burst may have as many requests as the rate allows in this many seconds."""

_BUSY_ROLES: Final = 10
"""The rate of workers and admins, as a multiple of a viewer's: many workers may share a token."""

bearer_scheme = HTTPBearer(
    auto_error=False,
    scheme_name="bearer",
    description="A token: that of the data directory, or one of `layout-tuner token create`.",
)
"""For the OpenAPI document only; the gate checks tokens."""


class Gate:
    """Middleware that passes on the requests that the table of access admits."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: RouteMap,
        book: TokenBook,
        owners: Owners,
        guesses: Guesses,
        limits: Mapping[TokenRole, Throttle],
    ) -> None:
        self._app = app
        self._routes, self._book, self._owners = routes, book, owners
        self._guesses, self._limits = guesses, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise NotImplementedError(f"the gate does not check {scope['type']} connections")
        asked = self._routes.asked(scope)
        rule = _rule_of(asked, scope["path"])
        refusal = None if rule is OPEN else await self._refusal(scope, asked, rule)
        if refusal is None and rule is not None and rule.lasts:
            await answer_while_valid(
                self._app, scope, receive, send, functools.partial(self._is_valid, scope)
            )
            return
        await (refusal or self._app)(scope, receive, send)

    async def _is_valid(self, scope: Scope) -> bool:
        token = _token_of(scope)
        return token is not None and await self._book.find(hash_of_token(token)) is not None

    async def _refusal(
        self, scope: Scope, asked: Asked | None, rule: AccessRule | None
    ) -> Response | None:
        """The refusal of a request; None: it passes, with its actor."""
        address = scope["client"][0] if scope.get("client") else ""
        try:
            holder = await self._holder(scope, address)
            if isinstance(holder, Response):
                return holder
            wait_s = self._limits[holder.role].take(holder.token_id or holder.name)
            if wait_s > 0:
                return _too_many(f"the token {holder.name!r} asks too often", wait_s)
            if asked is not None and rule is not None:
                why = await self._why_not(holder, asked, rule)
                if why is not None:
                    return problem_response(HTTPStatus.FORBIDDEN, why)
        except DatabaseUnavailableError as error:
            return problem_response(
                HTTPStatus.SERVICE_UNAVAILABLE,
                str(error),
                kind="database-unavailable",
                headers={"Retry-After": "1"},
            )
        state = scope.setdefault("state", {})
        state["holder"] = holder
        state["actor"] = Actor(
            name=holder.name, role=holder.role, token_id=holder.token_id, address=address[:64]
        )
        return None

    async def _holder(self, scope: Scope, address: str) -> Holder | Response:
        token = _token_of(scope)
        if token is None:
            return _unauthorized("the request carries no token")
        hashed = hash_of_token(token)
        wait_s = self._guesses.begin(address, hashed)
        if wait_s > 0:
            return _too_many("too many wrong tokens came from this address", wait_s)
        try:
            holder = await self._book.find(hashed)
        except DatabaseUnavailableError:
            self._guesses.was_not_judged(address, hashed)
            raise
        if holder is None:
            self._guesses.was_wrong(address, hashed)
            return _unauthorized(
                "the request carries no valid token: it is unknown, expired or revoked"
            )
        self._guesses.was_right(address, hashed)
        return holder

    async def _why_not(self, holder: Holder, asked: Asked, rule: AccessRule) -> str | None:
        if not rule.admits(holder.role):
            return (
                f"the token {holder.name!r} has the role {holder.role}, and {asked.operation} takes "
                f"{rule.admitted()}; ask an admin of the service for another token"
            )
        if rule.owned is None or holder.role == "admin":
            return None
        return await self._owners.why_not(rule.owned, asked.path_parameters, holder.name)


def make_limits(requests_per_s: float) -> Mapping[TokenRole, Throttle]:
    """The rate limits by role.

    Args:
        requests_per_s: for a viewer's or submitter's token; admins and workers get ten times that.
    """

    def limit(times: int) -> Throttle:
        per_s = requests_per_s * times
        return Throttle(per_s=per_s, burst=max(1.0, per_s * BURST_S))

    few, many = limit(1), limit(_BUSY_ROLES)
    return {"viewer": few, "submitter": few, "admin": many, "worker": many}


async def judged(request: Request) -> None:
    """Checks the route that answers again, in case the gate found another one: a fault of ours.

    Raises:
        AccessUndeclaredError: the rule of the route does not admit the actor.
    """
    operation = request.scope["route"].name
    rule = ACCESS.get(operation)
    actor: Actor | None = getattr(request.state, "actor", None)
    if rule is None or not (rule is OPEN or _admits(rule, actor)):
        raise AccessUndeclaredError(f"{operation} was asked for past the gate")


def _admits(rule: AccessRule, actor: Actor | None) -> bool:
    return actor is not None and actor.role != "system" and rule.admits(actor.role)


def _rule_of(asked: Asked | None, path: str) -> AccessRule | None:
    """The rule of a request; None: no route below /v1 matches, which only token holders may see."""
    if asked is not None:
        return ACCESS[asked.operation]
    return None if path == "/v1" or path.startswith("/v1/") else OPEN


def _token_of(scope: Scope) -> bytes | None:
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, given = bytes(value).partition(b" ")
            return given.strip() if scheme.lower() == b"bearer" else None
    return None


def _unauthorized(why: str) -> Response:
    return problem_response(
        HTTPStatus.UNAUTHORIZED,
        f'{why}; send a valid one as "Authorization: Bearer <token>" (the data directory has a token '
        "file, `layout-tuner token create` makes more)",
        headers={"WWW-Authenticate": 'Bearer realm="layout-tuner"'},
    )


def _too_many(why: str, wait_s: float) -> Response:
    seconds = max(1, math.ceil(wait_s))
    return problem_response(
        HTTPStatus.TOO_MANY_REQUESTS,
        f"{why}; try again in {seconds} s",
        headers={"Retry-After": str(seconds)},
    )

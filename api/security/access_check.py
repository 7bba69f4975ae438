"""The access check: the checks of every request, before its body is read.

In order: authentication (401; a form token that is missing or wrong: 403), rate limit (429), role
(403), ownership (403). A request that passes carries its `Actor`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Final

from fastapi import Request
from fastapi.routing import iter_route_contexts
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from layout_tuner.api.errors import AccessUndeclaredError, FormTokenInvalidError
from layout_tuner.api.http.error_responses import known_error, problem_response, too_many
from layout_tuner.api.http.rate_limit import Throttle
from layout_tuner.api.http.route_map import Asked, RouteMap
from layout_tuner.api.security.authentication import (
    WRONG_FORM_TOKEN,
    Authentication,
    Credential,
    address_of,
    is_api,
)
from layout_tuner.api.security.holders import Holder
from layout_tuner.api.security.roles import ACCESS, OPEN, AccessRule, OwnersOfThings
from layout_tuner.api.security.session_cookie import FORM_FIELD, form_token, is_form_token
from layout_tuner.results_db.actor import Actor, TokenRole
from layout_tuner.results_db.errors import DatabaseUnavailableError
from layout_tuner.results_db.rows import record_of

BEARER_SCHEME: Final = {
    "type": "http",
    "description": "A token: that of the data directory, or one of `layout-tuner token create`.",
    "scheme": "bearer",
}
"""For the OpenAPI document only; the access check checks tokens."""


class AccessCheck:
    """Middleware that passes on the requests that the table of access admits."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        routes: RouteMap,
        authentication: Authentication,
        owners: OwnersOfThings,
        limits: Mapping[TokenRole, Throttle],
    ) -> None:
        self._app = app
        self._routes, self._authentication, self._owners = routes, authentication, owners
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            raise NotImplementedError(
                f"the access check does not check {scope['type']} connections"
            )
        asked = self._routes.asked(scope)
        rule = _rule_of(asked, scope)
        if rule is OPEN:
            await self._app(scope, receive, send)
            return
        try:
            credential = await self._checked(scope, asked, rule)
        except DatabaseUnavailableError as error:
            credential = known_error(Request(scope), error)
        if isinstance(credential, Response):
            await credential(scope, receive, send)
            return
        _note(scope, credential)
        await self._app(scope, receive, send)

    async def _checked(
        self, scope: Scope, asked: Asked | None, rule: AccessRule | None
    ) -> Credential | Response:
        """The credential of a request that may pass, or the refusal."""
        credential = await self._authentication.credential(scope)
        if isinstance(credential, Response):
            return credential
        holder = credential.holder
        wait_s = self._limits[holder.role].take(holder.token_id or holder.name)
        if wait_s > 0:
            return too_many(f"the token {holder.name!r} asks too often", wait_s)
        if asked is not None and rule is not None:
            why = await self._why_not(_actor(scope, holder), asked, rule)
            if why is not None:
                return problem_response(HTTPStatus.FORBIDDEN, why)
        return credential

    async def _why_not(self, actor: Actor, asked: Asked, rule: AccessRule) -> str | None:
        assert actor.role != "system"  # no request has it
        if not rule.admits(actor.role):
            return (
                f"the token {actor.name!r} has the role {actor.role}, and {asked.operation} takes "
                f"{rule.admitted()}; ask an admin of the service for another token"
            )
        if rule.owned is None or actor.role == "admin":
            return None
        return await self._owners.why_not(rule.owned, asked.path_parameters, actor)


def _actor(scope: Scope, holder: Holder) -> Actor:
    return record_of(Actor, holder, address=address_of(scope)[:64])


def _note(scope: Scope, credential: Credential) -> None:
    holder = credential.holder
    state = scope.setdefault("state", {})
    state["credential"], state["holder"] = credential, holder
    state["actor"] = _actor(scope, holder)
    if credential.session_secret is not None and not is_api(scope):
        state["csrf_token"] = form_token(credential.session_secret)


async def check_again(request: Request) -> None:
    """Checks the route that answers, in case the access check found another one: a fault of ours.

    It also checks the form token of a form, which the access check cannot read.

    Raises:
        AccessUndeclaredError: the rule of the route does not admit the actor.
        FormTokenInvalidError: a form of a page has no token of its session.
    """
    operation = request.scope["route"].name
    rule = ACCESS.get(operation)
    actor: Actor | None = getattr(request.state, "actor", None)
    if rule is None or not (rule is OPEN or _admits(rule, actor)):
        raise AccessUndeclaredError(f"{operation} was asked for past the access check")
    credential: Credential | None = getattr(request.state, "credential", None)
    if credential is not None and not credential.is_proven:
        form = await request.form()
        assert credential.session_secret is not None  # a token needs no proof
        if not is_form_token(credential.session_secret, form.get(FORM_FIELD)):
            raise FormTokenInvalidError(WRONG_FORM_TOKEN)


def refuse_unchecked(routes: Sequence[BaseRoute]) -> None:
    """Raises AccessUndeclaredError for a changing route that lacks the check `check_again`."""
    for route in iter_route_contexts(routes):
        if not set(route.methods or ()) - {"GET", "HEAD"}:
            continue
        if check_again not in getattr(route.original_route, "checks", ()):
            raise AccessUndeclaredError(
                f"the route {route.name} lacks the check `check_again`: it would accept forms of "
                "other sites' pages"
            )


def _admits(rule: AccessRule, actor: Actor | None) -> bool:
    return actor is not None and actor.role != "system" and rule.admits(actor.role)


def _rule_of(asked: Asked | None, scope: Scope) -> AccessRule | None:
    """The rule of a request; None: no route below /v1 matches, which only token holders may see."""
    if asked is not None:
        return ACCESS[asked.operation]
    return None if is_api(scope) else OPEN

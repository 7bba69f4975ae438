"""Sessions of owners whom a provider or a proxy's header names, and the audit of both."""

from __future__ import annotations

import base64
import re
import secrets
from dataclasses import replace
from datetime import timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Literal

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp

from layout_tuner.api.errors import SignInRefusedError
from layout_tuner.api.http.browser_guard import browser_host, browser_scheme
from layout_tuner.api.http.rate_limit import Throttle, network_of
from layout_tuner.api.security.authentication import address_of
from layout_tuner.api.security.owner_header import OwnerHeader, proxied_owner
from layout_tuner.api.security.session_cookie import SessionCookie
from layout_tuner.api.security.sign_in_options import Admission, SignInOptions
from layout_tuner.results_db.actor import SYSTEM, Actor
from layout_tuner.results_db.store import Store

if TYPE_CHECKING:
    from layout_tuner.api.security.oidc import Provider

BEGUN_FOR: Final = timedelta(minutes=10)
"""Time for signing in at the provider."""
REFUSALS_PER_S, REFUSALS_AT_ONCE = 0.1, 20
"""Refusals of an address that the audit records; further ones leave no entry."""
_BEGUN: Final = re.compile(r"[A-Za-z0-9_-]{43,2800}")
"""A random secret, and the path to go on to."""


class OwnerSignIn:
    """Signs owners in without a token. Not thread-safe: the event loop uses it."""

    def __init__(self, options: SignInOptions, store: Store, sessions: SessionCookie) -> None:
        self.options, self._store = options, store
        self._noted = Throttle(per_s=REFUSALS_PER_S, burst=REFUSALS_AT_ONCE)
        # Lax: the provider sends the browser back from another site.
        of_begun = {"base_name": "layout_tuner_begun", "content": _BEGUN, "life": BEGUN_FOR}
        self.begun = replace(sessions, **of_begun, same_site="lax")  # type: ignore[arg-type]
        self._provider: Provider | None = None
        if options.oidc_issuer:
            # It takes a fifth of a second to import.
            from layout_tuner.api.security.oidc import Provider

            self._provider = Provider(options, store.now)

    async def aclose(self) -> None:
        if self._provider is not None:
            await self._provider.close()

    def behind(self, proxies: tuple[str, ...], app: ASGIApp) -> ASGIApp:
        """The application behind proxies that name owners, if they do."""
        header, groups = self.options.owner_header, self.options.groups_header
        return OwnerHeader(app, header, groups, proxies, self._refused) if header else app

    async def begin(self, request: Request, target: str) -> Response | SignInRefusedError:
        """The way to the provider, or why there is none."""
        cookie = secrets.token_urlsafe(32) + base64.urlsafe_b64encode(target.encode()).decode()
        cookie = cookie.rstrip("=")
        try:
            url = await self._known_provider().begin(cookie, self._address(request))
        except SignInRefusedError as error:
            return error
        kept = {"Cache-Control": "no-store"}
        answer = RedirectResponse(url, HTTPStatus.SEE_OTHER, headers=kept)
        self.begun.put(request.scope, answer, cookie)
        return answer

    async def finish(self, request: Request) -> tuple[str, str | SignInRefusedError]:
        """The path to go on to, and the new session's secret, or why there is none."""
        cookie = self.begun.secret(request.scope) or ""
        try:
            target = base64.urlsafe_b64decode(cookie[43:] + "==").decode()
        except ValueError:
            target = "/"
        try:
            provider, given = self._known_provider(), dict(request.query_params)
            admission = await provider.finish(cookie, given, self._address(request))
            return target, await self._session(request, admission, "oidc")
        except SignInRefusedError as error:
            await self._refused(address_of(request.scope), str(error), self.options.oidc_issuer)
            return target, error

    async def by_header(self, request: Request) -> str | SignInRefusedError:
        """A new session's secret for the owner whom the proxy names, or why there is none."""
        named, header = proxied_owner(request.scope), self.options.owner_header
        assert named is not None
        try:
            admission = self.options.admitted(named.owner, named.groups, source=header)
            return await self._session(request, admission, "header")
        except SignInRefusedError as error:
            await self._refused(address_of(request.scope), str(error))
            return error

    def sign_out_address(self, request: Request, id_token: str) -> str | None:
        """Where the browser ends its session at the provider; None: it is not known."""
        if self._provider is None:
            return None
        return self._provider.sign_out_address(id_token, self._address(request, "/sign-in"))

    async def _session(
        self, request: Request, admission: Admission, by: Literal["oidc", "header"]
    ) -> str:
        owner, role, groups = admission.owner, admission.role, admission.groups
        store = self._store.by(Actor(name=owner, role=role, address=address_of(request.scope)[:64]))
        details = {"source": admission.source, "subject": admission.subject, "role": role}
        details["groups_left_out"] = str(admission.num_left_out)
        columns = {"role": role, "source": admission.source, "id_token": admission.id_token}

        def create() -> str:
            if groups is not None:
                store.owners.note_claimed_groups(owner, groups)
            return store.sign_ins.create_owner_session(by, owner, details, columns)

        return await run_in_threadpool(create)

    async def _refused(self, address: str, why: str, source: str = "") -> None:
        if self._noted.take(network_of(address)) == 0:
            own = self._store.by(replace(SYSTEM, address=address[:64])).sign_ins
            await run_in_threadpool(own.note_refusal, source or self.options.owner_header, why)

    def _known_provider(self) -> Provider:
        if self._provider is None:
            raise SignInRefusedError("this service has no provider: sign in with a code or a token")
        return self._provider

    def _address(self, request: Request, path: str = "/sign-in/from-provider") -> str:
        """The address of a page in the browser; without a path, that of the way back."""
        is_behind = self.begun.is_behind_proxy
        host = browser_host(request.headers, is_behind)
        prefix = request.scope.get("root_path", "")
        return f"{browser_scheme(request.scope, is_behind)}://{host}{prefix}{path}"

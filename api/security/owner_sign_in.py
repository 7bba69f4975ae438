"""Sessions of owners whom a provider or a proxy's header names, and the audit of both."""

from __future__ import annotations

import secrets
from dataclasses import replace
from datetime import timedelta
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp

from layout_tuner.api.errors import SignInOwnerError, SignInRefusedError
from layout_tuner.api.http.browser_guard import browser_host, browser_scheme
from layout_tuner.api.http.rate_limit import Throttle, network_of
from layout_tuner.api.http.sign_in_options import Admission, SignInOptions
from layout_tuner.api.security.authentication import address_of
from layout_tuner.api.security.owner_header import OwnerHeader, ProxiedOwner
from layout_tuner.api.security.session_cookie import SessionCookie
from layout_tuner.results_db.actor import SYSTEM
from layout_tuner.results_db.errors import OwnerInvalidError, TokenInvalidError
from layout_tuner.results_db.store import Store

if TYPE_CHECKING:
    from layout_tuner.api.security.oidc import Provider

BEGUN_FOR: Final = timedelta(minutes=10)
"""Time for signing in at the provider."""
REFUSALS_PER_S, REFUSALS_AT_ONCE = 0.1, 20
"""Refusals of an address that the audit records; further ones leave no entry."""


class OwnerSignIn:
    """Signs owners in without a token. Not thread-safe: the event loop uses it."""

    def __init__(self, options: SignInOptions, store: Store, sessions: SessionCookie) -> None:
        self.options, self._store = options, store
        self._noted = Throttle(per_s=REFUSALS_PER_S, burst=REFUSALS_AT_ONCE)
        # Lax: the provider sends the browser back from another site.
        name = "layout_tuner_begun"
        self.begun = replace(sessions, base_name=name, life=BEGUN_FOR, same_site="lax")
        self._provider: Provider | None = None
        if options.oidc_issuer:
            # It takes a fifth of a second to import.
            from layout_tuner.api.security.oidc import Provider

            self._provider = Provider(options, store.now)

    async def aclose(self) -> None:
        if self._provider is not None:
            await self._provider.close()

    def behind(self, proxies: tuple[str, ...], app: ASGIApp) -> ASGIApp:
        """The application behind proxies, if there are any."""
        header, groups = self.options.owner_header, self.options.groups_header
        return OwnerHeader(app, header, groups, proxies, self._refused) if proxies else app

    async def begin(self, request: Request, target: str) -> Response:
        """The way to the provider; SignInRefusedError if there is none."""
        cookie = secrets.token_urlsafe(32)
        url = await self._known_provider().begin(cookie, target, self._address(request))
        kept = {"Cache-Control": "no-store"}
        answer = RedirectResponse(url, HTTPStatus.SEE_OTHER, headers=kept)
        self.begun.put(request.scope, answer, cookie)
        return answer

    async def session(self, request: Request, named: ProxiedOwner | None = None) -> str:
        """The secret of a new session for the owner whom a proxy has named, or the provider names.

        Raises SignInRefusedError if they may not sign in.
        """
        options, address = self.options, address_of(request.scope)
        store = self._store.by(replace(SYSTEM, address=address[:64]))

        def create(admitted: Admission) -> str:
            new = store.sign_ins.create_owner_session
            owner, secret = new(admitted.owner, **admitted.session)
            if admitted.groups is not None:
                store.owners.note_claimed_groups(owner, admitted.groups)
            return secret

        try:
            if named is not None:
                admission = options.admitted(named.owner, named.groups, options.owner_header)
            else:
                cookie, given = self.begun.secret(request.scope), request.query_params
                provider = self._known_provider()
                admission = await provider.finish(cookie, given, self._address(request))
            return await run_in_threadpool(create, admission)
        except (SignInRefusedError, TokenInvalidError, OwnerInvalidError) as error:
            source = options.oidc_issuer if named is None else options.owner_header
            await self._refused(address, str(error), source)
            if isinstance(error, SignInRefusedError):
                raise
            raise SignInOwnerError(str(error)) from error

    def sign_out_address(self, request: Request, id_token: str) -> str | None:
        """Where the browser ends its session at the provider; None: it is not known."""
        back = self._address(request, "/sign-in")
        return self._provider.sign_out_address(id_token, back) if self._provider else None

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

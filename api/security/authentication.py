"""Authentication of requests: by a token in a header, or by a session, which a code begins.

The Authorization header wins over the cookie. A request with a cookie that changes something has to
prove that one of this service's own pages sent it: the cookie is SameSite=Strict, the browser's own
headers name the page (`why_foreign`), and the request has a form token of the session. A page's
script sends the form token in a header. A plain form has it among its fields, which are checked
where the body is read (`check_again`).

A session whose owner a proxy's header named counts only with the same header.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final
from urllib.parse import SplitResult, quote, urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import Scope

from layout_tuner.api.errors import SignInRefusedError, SignInRoleError, SignInTooOftenError
from layout_tuner.api.http.browser_guard import browser_host, why_foreign
from layout_tuner.api.http.error_responses import problem_response
from layout_tuner.api.http.rate_limit import GuessLimit
from layout_tuner.api.http.url_prefix import route_path
from layout_tuner.api.security.holders import Holder, SessionBook, TokenBook
from layout_tuner.api.security.owner_header import proxied_owner
from layout_tuner.api.security.session_cookie import FORM_HEADER, SessionCookie, is_form_token
from layout_tuner.documents.json_and_yaml import media_type_of
from layout_tuner.results_db.access.tokens import hash_of_token
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.errors import DatabaseUnavailableError
from layout_tuner.results_db.rows import record_of
from layout_tuner.results_db.store import Store

MAX_TARGET: Final = 2000

_LOCAL_PATH: Final = re.compile(r"/(?![/\\])[\x21\x23-\x5b\x5d-\x7e]*")
"""A path of this service: no host (//), and neither spaces, quotes, backslashes nor control
characters, which browsers drop or read as slashes."""

_OF_SIGN_IN: Final = re.compile(r"/sign-(?:in|out)(?:[/?#].*)?")
_READING: Final = ("GET", "HEAD")
_FORMS: Final = ("application/x-www-form-urlencoded", "multipart/form-data")

_CONTINUE: Final = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="refresh" content="0;url={url}">
<title>layout-tuner</title>
<p><a href="{url}">Continue</a></p>
</html>
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Credential:
    """The token or the session that authenticated a request."""

    holder: Holder
    token_hash: str
    session_secret: str | None = field(default=None, repr=False)
    """The secret of the browser's session; None: the request has a token."""
    is_proven: bool = True
    """Whether the request needs no form token, or has had a right one in its header."""

    @property
    def session_hash(self) -> str | None:
        """The hash of the session's secret; None: the request has a token."""
        secret = self.session_secret
        return None if secret is None else hash_of_token(secret.encode())


@dataclass(frozen=True, kw_only=True, slots=True)
class Authentication:
    """Finds the holder of a request. Not thread-safe: the event loop uses it."""

    book: TokenBook
    sessions: SessionBook
    cookie: SessionCookie
    guess_limit: GuessLimit
    """Counts wrong sign-in codes."""

    async def credential(self, scope: Scope) -> Credential | Response:
        """A request's credential, or its refusal; DatabaseUnavailableError without a database."""
        headers = Headers(scope=scope)
        if "authorization" in headers:
            return await self._of_token(headers["authorization"])
        secret = self.cookie.secret(scope)
        if secret is None:
            return self._unauthenticated(scope, headers, "the request carries no token")
        refusal = self._why_not_from_here(scope, headers)
        if refusal is not None:
            return problem_response(HTTPStatus.FORBIDDEN, refusal)
        proof = headers.get(FORM_HEADER)
        if proof is not None and not is_form_token(secret, proof):
            return problem_response(HTTPStatus.FORBIDDEN, WRONG_FORM_TOKEN)
        is_proven = proof is not None or scope["method"] in _READING
        # A form of a page has the form token among its fields.
        kind = media_type_of(headers.get("content-type", ""))
        if not is_proven and (is_api(scope) or kind not in _FORMS):
            return problem_response(
                HTTPStatus.FORBIDDEN,
                f"a request with the cookie of a session needs its form token in {FORM_HEADER}",
            )
        return await self._of_session(scope, headers, secret, is_proven=is_proven)

    async def session_holder(self, scope: Scope) -> Holder | None:
        """The holder of the session of a request; None: it has no valid session."""
        secret = self.cookie.secret(scope)
        if secret is None:
            return None
        found = await self._of_session(scope, Headers(scope=scope), secret, is_proven=False)
        return found.holder if isinstance(found, Credential) else None

    async def valid_ones(self, credentials: Collection[Credential]) -> set[Credential]:
        """Those of the credentials whose token, and session, are valid now.

        The database is asked once for all tokens and once for all sessions.
        """
        tokens = await self.book.valid_ones({each.token_hash for each in credentials})
        hashes = {each.session_hash for each in credentials if each.session_hash}
        sessions = {None, *await self.sessions.valid_ones(hashes)}
        return {e for e in credentials if e.token_hash in tokens and e.session_hash in sessions}

    async def _of_token(self, authorization: str) -> Credential | Response:
        scheme, _, given = authorization.encode("latin-1").partition(b" ")
        if scheme.lower() != b"bearer":
            return _unauthorized("the request carries no token")
        hashed = hash_of_token(given.strip())
        holder = await self.book.find(hashed)
        if holder is None:
            return _unauthorized(
                "the request carries no valid token: it is unknown, expired or revoked"
            )
        return Credential(holder=holder, token_hash=hashed)

    async def _of_session(
        self, scope: Scope, headers: Headers, secret: str, *, is_proven: bool
    ) -> Credential | Response:
        token_hash = await self.sessions.find(hash_of_token(secret.encode()))
        holder = None if token_hash is None else await self.book.find(token_hash)
        if holder is not None and holder.source and "://" not in holder.source:  # a header
            named = proxied_owner(scope)
            holder = holder if named is not None and named.owner == holder.owner else None
        if token_hash is None or holder is None:
            why = "the session has ended, or its token has expired or was revoked"
            refusal = self._unauthenticated(scope, headers, why, has_ended=True)
            self.cookie.remove(scope, refusal)
            return refusal
        return Credential(
            holder=holder, token_hash=token_hash, session_secret=secret, is_proven=is_proven
        )

    def _why_not_from_here(self, scope: Scope, headers: Headers) -> str | None:
        """Why a cookie does not count in a request; None: it does."""
        if scope["method"] not in _READING:
            why = why_foreign(headers, self.cookie.is_behind_proxy)
            return None if why is None else f"the cookie of a session does not count: {why}"
        site = headers.get("sec-fetch-site")
        if site in ("same-origin", "none"):
            return None
        # Links of other sites lead to pages. Some browsers do not send Sec-Fetch-Site to loopback.
        is_page = not is_api(scope)
        if is_page and (site is None or headers.get("sec-fetch-mode") == "navigate"):
            return None
        if site is None and self._own_referer(headers) is not None:
            return None
        return (
            "the cookie of a session counts only for requests of this service's pages "
            f"(Sec-Fetch-Site: {site!r}); send a token as Authorization instead"
        )

    def _unauthenticated(
        self, scope: Scope, headers: Headers, why: str, *, has_ended: bool = False
    ) -> Response:
        """The answer without a session: to a page the way to the sign-in page, else 401."""
        if is_api(scope) or "text/html" not in headers.get("accept", ""):
            return _unauthorized(why)
        is_reading = scope["method"] in _READING
        target = _target(scope) if is_reading else self._page_of(scope, headers)
        url = f"{scope.get('root_path', '')}/sign-in?next={quote(target, safe='')}"
        url += "&why=ended" if has_ended else ""
        if is_reading and headers.get("sec-fetch-site") == "cross-site":
            # A link of another site comes without the Strict cookie. The next request comes from
            # this page and has it; the sign-in page sends a browser with a session on.
            return gone_on_from_here(url)
        return RedirectResponse(url, HTTPStatus.SEE_OTHER, headers={"Cache-Control": "no-store"})

    def _page_of(self, scope: Scope, headers: Headers) -> str:
        """The page whose form was sent, as its Referer names it; else the first page."""
        referer = self._own_referer(headers)
        if referer is None:
            return "/"
        path = route_path({**scope, "path": referer.path})
        return f"{path}?{referer.query}" if referer.query else path

    def _own_referer(self, headers: Headers) -> SplitResult | None:
        """The page of this service that sends a request; None: it does not say so."""
        try:
            referer = urlsplit(headers.get("referer", ""))
        except ValueError:
            return None
        host = browser_host(headers, self.cookie.is_behind_proxy)
        return referer if host and referer.netloc == host else None


def gone_on_from_here(url: str) -> Response:
    """A page that leads on, so that the next request comes from this service and not from afar."""
    kept = {"Cache-Control": "no-store", "Referrer-Policy": "same-origin"}
    return HTMLResponse(_CONTINUE.format(url=html.escape(url)), headers=kept)


def local_target(given: str) -> str:
    """The path to go on to after the sign-in: as given if it is one of this service, else /."""
    is_fine = len(given) <= MAX_TARGET and _LOCAL_PATH.fullmatch(given)
    return given if is_fine and not _OF_SIGN_IN.fullmatch(given) else "/"


def begin_guess(limit: GuessLimit, address: str) -> None:
    """Counts a code or a token that may be wrong; SignInTooOftenError: the address has to wait."""
    wait_s = limit.begin(address)
    if wait_s > 0:
        raise SignInTooOftenError(
            "too many wrong codes and tokens came from this address; try again in "
            f"{math.ceil(wait_s)} s",
            wait_s=wait_s,
        )


async def begin_session(
    store: Store,
    authentication: Authentication,
    secret: str,
    *,
    address: str,
    codes_only: bool = False,
) -> str:
    """Exchanges a one-time code, or a token, for a session; returns the session's secret.

    Wrong ones are counted by address. A token is refused if `codes_only`. How long codes and
    sessions live is in `results_db/access/browser_sessions.py`.

    Raises:
        SignInRefusedError: it is neither, or no longer valid.
        SignInRoleError: it is a worker's.
        SignInTooOftenError: the address has to wait.
        DatabaseUnavailableError: the database cannot be asked.
    """
    limit, hashed = authentication.guess_limit, hash_of_token(secret.encode())
    begin_guess(limit, address)
    try:
        session = await _exchanged(store, authentication, hashed, address, codes_only=codes_only)
    except (DatabaseUnavailableError, SignInRoleError):
        limit.was_no_guess(address)
        raise
    if session is None:
        raise SignInRefusedError(
            "this code or token does not sign in: it is wrong, has expired, was revoked, or is a "
            "code that was used before; `layout-tuner login` prints an address with a new code"
        )
    limit.was_no_guess(address)
    return session


async def _exchanged(
    store: Store, authentication: Authentication, hashed: str, address: str, *, codes_only: bool
) -> str | None:
    """The secret of a new session; None: this is neither a code nor a token that is valid."""
    of_code = await run_in_threadpool(store.sign_ins.token_of_code, hashed)
    token_hash = of_code or (None if codes_only else hashed)
    holder = None if token_hash is None else await authentication.book.find(token_hash)
    if token_hash is None or holder is None:
        return None
    if holder.role == "worker":
        raise SignInRoleError(
            f"the token {holder.name!r} is a worker's, and workers have no pages: sign in with the "
            "token of a viewer, a submitter or an admin"
        )
    own = store.by(record_of(Actor, holder, address=address[:64]))
    if of_code is not None:
        return await run_in_threadpool(own.sign_ins.exchange_code, hashed)
    return await run_in_threadpool(own.sign_ins.create_session, token_hash)


WRONG_FORM_TOKEN: Final = "the form is not of this session: reload the page and send it again"  # noqa: S105 - a message


def is_api(scope: Scope) -> bool:
    """Whether a request is of the API, not of a page."""
    path = route_path(scope)
    return path == "/v1" or path.startswith("/v1/")


def address_of(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else ""


def _unauthorized(why: str) -> Response:
    return problem_response(
        HTTPStatus.UNAUTHORIZED,
        f'{why}; send a valid one as "Authorization: Bearer <token>" (the data directory has a token '
        "file, `layout-tuner token create` makes more)",
        headers={"WWW-Authenticate": 'Bearer realm="layout-tuner"'},
    )


def _target(scope: Scope) -> str:
    """The path and query of a request, without the URL prefix."""
    path, query = quote(route_path(scope)), scope.get("query_string", b"")
    return f"{path}?{query.decode('latin-1')}" if query else path

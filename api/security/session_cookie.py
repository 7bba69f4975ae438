"""The cookie of a session: its name, where it is sent, and the form tokens that belong to it.

The name has the port that the browser sees, because browsers send cookies to all ports of a host
(RFC 6265, section 8.5). A form token is an HMAC of the session's secret. It is masked with new
random bits in each page, so that a compressed page does not leak it (BREACH).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from layout_tuner.api.http.browser_guard import browser_host, browser_scheme
from layout_tuner.results_db.access.browser_sessions import SESSION_LIFE

NAME: Final = "layout_tuner"

FORM_FIELD: Final = "csrf_token"
FORM_HEADER: Final = "X-CSRF-Token"
"""Where a request of a page has its form token."""

_SECRET: Final = re.compile(r"[A-Za-z0-9_-]{43}")
_PORT: Final = re.compile(r":(\d{1,5})$")
_PURPOSE: Final = b"layout-tuner form token"
_MASK_BYTES: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionCookie:
    """The cookie of this service's sessions, or of a sign-in that has begun."""

    is_behind_proxy: bool
    url_prefix: str = ""
    base_name: str = NAME
    life: timedelta = SESSION_LIFE
    same_site: Literal["strict", "lax"] = "strict"

    def secret(self, scope: Scope) -> str | None:
        """The secret in the cookie of a request; None: there is no cookie, or no secret in it."""
        sent = [(name, value) for name, value in _cookies(scope) if _SECRET.fullmatch(value)]
        found = dict(reversed(sent))  # the first of a name
        return next((found[name] for name in self._names(scope) if name in found), None)

    def put(self, scope: Scope, response: Response, secret: str) -> None:
        is_secure = browser_scheme(scope, self.is_behind_proxy) == "https"
        response.set_cookie(
            self._name(scope, is_secure=is_secure),
            secret,
            max_age=int(self.life.total_seconds()),
            path=self.url_prefix or "/",
            secure=is_secure,
            httponly=True,
            samesite=self.same_site,
        )

    def remove(self, scope: Scope, response: Response) -> None:
        """Makes the browser delete the cookie."""
        given = {name for name, _ in _cookies(scope)}
        for name in self._names(scope):
            if name in given:
                response.delete_cookie(
                    name,
                    path=self.url_prefix or "/",
                    secure=name.startswith("__"),
                    httponly=True,
                    samesite=self.same_site,
                )

    def _names(self, scope: Scope) -> tuple[str, ...]:
        """The names under which a request may have the cookie.

        Over TLS only the name with a prefix counts: a page of plain HTTP cannot set such a cookie.
        """
        secure = self._name(scope, is_secure=True)
        if scope["scheme"] == "https":
            return (secure,)
        plain = self._name(scope, is_secure=False)
        # A proxy may not say that the browser uses TLS.
        return (plain, secure) if self.is_behind_proxy else (plain,)

    def _name(self, scope: Scope, *, is_secure: bool) -> str:
        port = _PORT.search(browser_host(Headers(scope=scope), self.is_behind_proxy))
        name = f"{self.base_name}_{port[1]}" if port else self.base_name
        if not is_secure:
            return name
        # Browsers accept __Host- only with the path /.
        return f"{'__Secure-' if self.url_prefix else '__Host-'}{name}"


def form_token(secret: str) -> str:
    mask = secrets.token_bytes(_MASK_BYTES)
    return base64.urlsafe_b64encode(mask + _masked(secret, mask)).decode()


def is_form_token(secret: str, token: object) -> bool:
    if not isinstance(token, str):
        return False
    try:
        decoded = base64.b64decode(token, altchars=b"-_", validate=True)
    except ValueError:
        return False
    if len(decoded) != 2 * _MASK_BYTES:
        return False
    mask, masked = decoded[:_MASK_BYTES], decoded[_MASK_BYTES:]
    return hmac.compare_digest(masked, _masked(secret, mask))


def _masked(secret: str, mask: bytes) -> bytes:
    digest = hmac.new(secret.encode(), _PURPOSE, hashlib.sha256).digest()
    return bytes(each ^ other for each, other in zip(digest, mask, strict=True))


def _cookies(scope: Scope) -> Iterator[tuple[str, str]]:
    """The cookies of a request, of whatever bytes, in the order in which they were sent.

    Of two with one name, browsers send the one with the longer path first.
    """
    for name, value in scope["headers"]:
        if name == b"cookie":
            for part in bytes(value).decode("latin-1").split(";"):
                cookie, _, content = part.strip(" \t").partition("=")
                yield cookie, content

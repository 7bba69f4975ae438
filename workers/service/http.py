"""Requests to the service, and what its answers mean: outbound HTTP with a bearer token."""

from __future__ import annotations

import ipaddress
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx

from search_spaces.pinned_certificate import distrust, trusting, why_distrusted
from workers.errors import (
    AnswerUnreadableError,
    RequestRefusedError,
    ServiceFailedError,
    ServiceUnreachableError,
    TokenRefusedError,
    UrlInvalidError,
)

_LOG = logging.getLogger(__name__)

ANSWER_WITHIN_S: Final = 10.0
_CONNECT_WITHIN_S: Final = 5.0
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
_AWAY: Final = frozenset({408, 429, 502, 503, 504})
"""Answers of a service, or of a proxy before it, that can't work for the moment."""

T = TypeVar("T")


class NotFoundError(RequestRefusedError):
    """404: what it means depends on what was asked for."""


class ConflictError(RequestRefusedError):
    """409, of which the same is true."""


class ServiceHttp:
    """Asks one service. Threads may share it.

    Raises:
        UrlInvalidError: at construction.
        CertificateUnreadableError: likewise.
    """

    def __init__(self, url: str, token: str, *, certificate: Path | None = None) -> None:
        """Asks the service at an address.

        Args:
            url: where it is.
            token: what it lets in.
            certificate: the service's own, which is trusted by itself; None: some authority vouches for it.
        """
        refuse_unless_http(url)
        self.url = url.rstrip("/")
        self._is_pinned = certificate is not None
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"},
            verify=True if certificate is None else trusting(certificate),
            trust_env=not _is_loopback(self.url),  # a proxy can't reach our own loopback
        )

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def request(
        self, method: str, path: str, body: Any, *, within_s: float = ANSWER_WITHIN_S
    ) -> Any:
        """The answer's document.

        Raises:
            ServiceUnreachableError: the service is away.
            ServiceFailedError: it broke down over the request.
            TokenRefusedError: it does not accept the token.
            RequestRefusedError: it refuses for good.
            AnswerUnreadableError: what answers is no service of ours, or for the moment none.
        """
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            timeout = httpx.Timeout(within_s, connect=min(within_s, _CONNECT_WITHIN_S))
            answer = self._http.request(
                method, path, content=content, headers=headers, timeout=timeout
            )
        except (httpx.RequestError, RuntimeError) as error:  # the latter: closed meanwhile
            why = why_distrusted(error)
            raise ServiceUnreachableError(
                f"the service at {self.url} does not answer ({error or type(error).__name__})"
                if why is None
                else distrust(self.url, why, is_pinned=self._is_pinned)
            ) from error
        if answer.is_success:
            return self.read(answer, lambda: answer.json() if answer.content else None)
        raise self._refusal(answer)

    def read(self, answer: Any, reading: Callable[[], T]) -> T:
        """What a reading makes of an answer.

        Raises:
            AnswerUnreadableError: the answer is of another form.
        """
        try:
            return reading()
        except (KeyError, TypeError, ValueError) as error:
            raise AnswerUnreadableError(
                f"what answers at {self.url} does not speak the worker protocol ({answer!r}); "
                "check the URL, and that service and worker are of the same version"
            ) from error

    def _refusal(self, answer: httpx.Response) -> Exception:
        said = f"the service at {self.url} answered {answer.status_code}: {_detail(answer)}"
        if answer.status_code in (401, 403):
            return TokenRefusedError(f"{said}; check the token file")
        if answer.status_code == 404:
            return NotFoundError(said)
        if answer.status_code == 409:
            return ConflictError(said)
        if answer.status_code in _AWAY:
            return ServiceUnreachableError(said)
        if answer.is_server_error:
            return ServiceFailedError(said)
        return RequestRefusedError(said)


def pauses() -> Iterator[float]:
    """Seconds to wait between tries while the service is away: growing, up to a limit."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def patiently(
    call: Callable[[], T], *, patience_s: float | None, wait: Callable[[float], Any]
) -> T:
    """Makes a call again and again while the service is away, or breaks down over it.

    Args:
        call: the call.
        patience_s: seconds after which its error is raised after all; None: never.
        wait: waits for some seconds; may raise to end it.

    Raises:
        ServiceUnreachableError: patience has run out.
        ServiceFailedError: likewise.
    """
    give_up_at = None if patience_s is None else time.monotonic() + patience_s
    for pause_s in pauses():
        try:
            return call()
        except (ServiceUnreachableError, ServiceFailedError) as error:
            if give_up_at is not None and time.monotonic() + pause_s > give_up_at:
                raise
            _LOG.warning("%s; trying again in %.1f s", error, pause_s)
            wait(pause_s)
    raise AssertionError("pauses never end")


def _detail(answer: httpx.Response) -> str:
    """What a problem document says, or else the start of the text."""
    try:
        problem = answer.json()
        return str(problem.get("detail") or problem.get("title") or problem)[:500]
    except (ValueError, AttributeError):
        return answer.text[:200]


def refuse_unless_http(url: str) -> None:
    """Refuses what can't be the address of a service.

    Raises:
        UrlInvalidError: it is none of HTTP's, or no address at all.
    """
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")  # as whoever looks the name up will do
    except (httpx.InvalidURL, UnicodeError) as error:
        raise UrlInvalidError(f"url={url!r} is not an address: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UrlInvalidError(
            f"url={url!r} is not an HTTP address; it reads like http://login1.example.org:8080"
        )


def _is_loopback(url: str) -> bool:
    try:
        host = httpx.URL(url).host
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False

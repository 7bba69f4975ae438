"""HTTP requests to the service with a bearer token: errors by status, and retries."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import httpx

from search_spaces.connection.outage_log import OutageLog
from search_spaces.connection.service_address import is_loopback_host
from search_spaces.connection.tls import trusting, why_unanswered
from workers.backoff import Backoff
from workers.errors import (
    AnswerUnreadableError,
    RequestRefusedError,
    ServiceFailedError,
    ServiceUnreachableError,
    TokenRefusedError,
    UrlInvalidError,
    WorkerError,
)

_LOG = logging.getLogger(__name__)

ANSWER_WITHIN_S: Final = 10.0
_CONNECT_WITHIN_S: Final = 5.0
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
MOST_REASONS: Final = 5
"""Different reasons for the failures of one loop that are written to the log."""
OUTAGE_ERRORS: Final = (ServiceUnreachableError, TokenRefusedError)
"""Errors that `LeaseClient` writes to the log, so that its callers need not."""
_AWAY: Final = frozenset({408, 429, 502, 503, 504})
"""Statuses of a service, or of a proxy in front of it, that can't answer for the moment."""

T = TypeVar("T")


class NotFoundError(RequestRefusedError):
    """Status 404; its meaning depends on the request."""


class ConflictError(RequestRefusedError):
    """Status 409; its meaning depends on the request."""


class ServiceHttp:
    """A client of one service. Threads may share it.

    Raises:
        UrlInvalidError: at construction.
        CertificateUnreadableError: at construction.
    """

    def __init__(self, url: str, token: str, *, certificate: Path | None = None) -> None:
        """Connects at the first request.

        Args:
            url: of the service.
            token: a token of the service.
            certificate: of a service with a self-signed certificate; None: an authority signed it.
        """
        refuse_unless_http(url)
        self.url = url.rstrip("/")
        self._is_pinned = certificate is not None
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"},
            verify=True if certificate is None else trusting(certificate),
            # A proxy can't reach our own loopback.
            trust_env=not is_loopback_host(httpx.URL(self.url).host),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def role(self, *, within_s: float = ANSWER_WITHIN_S) -> str:
        """The role of the token.

        Raises:
            WorkerError: the errors of `request`.
        """
        answer = self.request("GET", "/v1/whoami", None, within_s=within_s)
        return self.read(answer, lambda: str(answer["role"]))

    def request(
        self, method: str, path: str, body: Any, *, within_s: float = ANSWER_WITHIN_S
    ) -> Any:
        """Sends a request; returns the document of the answer.

        Raises:
            ServiceUnreachableError: the service does not answer.
            ServiceFailedError: it failed over the request.
            TokenRefusedError: it does not accept the token.
            RequestRefusedError: it refuses the request.
            AnswerUnreadableError: the answer is not one of this service.
        """
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            timeout = httpx.Timeout(within_s, connect=min(within_s, _CONNECT_WITHIN_S))
            answer = self._http.request(
                method, path, content=content, headers=headers, timeout=timeout
            )
        # RuntimeError: the client was closed meanwhile.
        except (httpx.RequestError, RuntimeError) as error:
            why = why_unanswered(self.url, error, is_pinned=self._is_pinned) or (
                f"the service at {self.url} does not answer ({error or type(error).__name__})"
            )
            raise ServiceUnreachableError(why) from error
        if answer.is_success:
            return self.read(answer, lambda: answer.json() if answer.content else None)
        raise self._refusal(answer)

    def read(self, answer: Any, reading: Callable[[], T]) -> T:
        """Calls a function that reads values from an answer.

        Raises:
            AnswerUnreadableError: the answer has another form.
        """
        try:
            return reading()
        except (KeyError, TypeError, ValueError) as error:
            raise AnswerUnreadableError(
                f"what answers at {self.url} does not speak the worker protocol ({answer!r}); "
                "check the URL, and that service and worker are of the same version"
            ) from error

    def _refusal(self, answer: httpx.Response) -> Exception:
        status = answer.status_code
        message = f"the service at {self.url} answered {status}: {_detail(answer)}"
        if status in (401, 403):
            return TokenRefusedError(f"{message}; check the token file")
        if status in _AWAY:
            return ServiceUnreachableError(message)
        if answer.is_server_error:
            return ServiceFailedError(message)
        kind = {404: NotFoundError, 409: ConflictError}.get(status, RequestRefusedError)
        return kind(message)


class RetryState:
    """The retries of one call to the service: the pauses between them, and the log of failures.

    `LeaseClient` writes outages of the service to the log, so they are left out here.

    Args:
        what: the call, as the subject of a sentence in the log.
    """

    def __init__(self, what: str) -> None:
        self._failures = OutageLog(_LOG, what, most_reasons=MOST_REASONS)
        self._begin()

    @property
    def pause_s(self) -> float:
        """Seconds to wait after the next failure."""
        return self._backoff.next_s

    def failed(self, error: Exception, consequence: str) -> float:
        """Notes a failure; returns how many seconds to wait before the next try.

        Args:
            error: why the call failed.
            consequence: what happens next, for the log.
        """
        if not isinstance(error, OUTAGE_ERRORS):
            trace = None if isinstance(error, WorkerError) else error
            self._failures.failed(f"{error}; {consequence}", trace=trace)
        return self._backoff.take()

    def worked(self) -> None:
        """Notes a success: the next pause is short again."""
        self._failures.worked()
        self._begin()

    def _begin(self) -> None:
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)


def patiently(
    call: Callable[[], T], what: str, *, patience_s: float | None, wait: Callable[[float], Any]
) -> T:
    """Repeats a call of `LeaseClient` while the service does not answer, or fails over it.

    Args:
        call: the call.
        what: the call, as the subject of a sentence in the log.
        patience_s: seconds after which the call's error is raised; None: never.
        wait: waits for some seconds; it may raise an exception to end the retries.

    Raises:
        ServiceUnreachableError: the time is over.
        ServiceFailedError: likewise.
    """
    give_up_at = None if patience_s is None else time.monotonic() + patience_s
    retries = RetryState(what)
    while True:
        try:
            answer = call()
        except (ServiceUnreachableError, ServiceFailedError) as error:
            if give_up_at is not None and time.monotonic() + retries.pause_s > give_up_at:
                raise
            wait(retries.failed(error, "it is tried again"))
        else:
            retries.worked()
            return answer


def _detail(answer: httpx.Response) -> str:
    """The detail of a problem document, or else the start of the text."""
    try:
        problem = answer.json()
        return str(problem.get("detail") or problem.get("title") or problem)[:500]
    except (ValueError, AttributeError):
        return answer.text[:200]


def refuse_unless_http(url: str) -> None:
    """Refuses a text that can't be the address of a service.

    Raises:
        UrlInvalidError: it is no HTTP address.
    """
    try:
        parsed = httpx.URL(url)
        parsed.host.encode("idna")  # as a name lookup does
    except (httpx.InvalidURL, UnicodeError) as error:
        raise UrlInvalidError(f"url={url!r} is not an address: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UrlInvalidError(
            f"url={url!r} is not an HTTP address such as http://login1.example.org:8080"
        )

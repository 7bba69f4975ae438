"""The worker's requests to the service: documents, errors by status, and retries."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import httpx

from search_spaces.connection.http_connection import TEMPORARY, TOO_MANY_REQUESTS, ServiceConnection
from search_spaces.connection.outage_log import OutageLog
from search_spaces.connection.tls import trusting
from search_spaces.errors import ServiceUnansweredError
from workers.backoff import Backoff
from workers.errors import (
    AnswerUnreadableError,
    ContentRefusedError,
    RequestRefusedError,
    ServiceFailedError,
    ServiceUnreachableError,
    TokenRefusedError,
)

_LOG = logging.getLogger(__name__)

ANSWER_WITHIN_S: Final = 10.0
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
_AWAY: Final = TEMPORARY | {408, TOO_MANY_REQUESTS}
"""Statuses of a service, or of a proxy in front of it, that can't answer for the moment."""
_OF_CONTENT: Final = (400, 413, 422)
"""Statuses of a body that is malformed, too large or contradicts something."""

T = TypeVar("T")


class NotFoundError(RequestRefusedError):
    """Status 404; its meaning depends on the request."""


class ConflictError(RequestRefusedError):
    """Status 409; its meaning depends on the request."""


class ServiceHttp:
    """A client of one service, which sends each request once. Threads may share it.

    Raises:
        UrlInvalidError: at construction.
        CertificateUnreadableError: at construction.
    """

    def __init__(self, url: str, token: str, *, certificate: Path | None = None) -> None:
        """Connects at the first request; a certificate is that of a service that signed its own."""
        tls = None if certificate is None else trusting(certificate)
        self._connection = ServiceConnection(url, token, tls=tls)
        self.url = self._connection.url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    def role(self, *, within_s: float = ANSWER_WITHIN_S) -> str:
        """The role of the token; raises the errors of `request`."""
        answer = self.request("GET", "/v1/whoami", None, within_s=within_s)
        return self.read(answer, lambda: str(answer["role"]))

    def request(
        self, method: str, path: str, body: Any, *, within_s: float = ANSWER_WITHIN_S
    ) -> Any:
        """Sends a request with a document, or its bytes; returns the document of the answer.

        Raises:
            ServiceUnreachableError: the service does not answer.
            ServiceFailedError: it failed over the request.
            TokenRefusedError: it does not accept the token.
            RequestRefusedError: it refuses the request; `ContentRefusedError`: for what it says.
            AnswerUnreadableError: the answer is not one of this service.
        """
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            answer = self._connection.request(
                method, path, within_s=within_s, content=content, headers=headers
            )
        except ServiceUnansweredError as error:
            raise ServiceUnreachableError(str(error)) from error
        if answer.is_success:
            return self.read(answer, lambda: answer.json() if answer.content else None)
        raise self._refusal(answer)

    def read(self, answer: Any, reading: Callable[[], T]) -> T:
        """Calls a reader of an answer's values; AnswerUnreadableError for another form."""
        try:
            return reading()
        except (KeyError, TypeError, ValueError) as error:
            raise AnswerUnreadableError(
                f"what answers at {self.url} does not speak the worker protocol ({answer!r}); "
                "check the URL, and that service and worker are of the same version"
            ) from error

    def _refusal(self, answer: httpx.Response) -> Exception:
        status = answer.status_code
        why = _detail(answer)
        message = f"the service at {self.url} answered {status}: {why}"
        if status in (401, 403):
            return TokenRefusedError(f"{message}; check the token file")
        if status in _AWAY:
            return ServiceUnreachableError(message)
        if answer.is_server_error:
            return ServiceFailedError(message)
        if status in _OF_CONTENT:
            return ContentRefusedError(message, why)
        kind = {404: NotFoundError, 409: ConflictError}.get(status, RequestRefusedError)
        return kind(message)


def pauses() -> Backoff:
    """The pauses of a loop between its tries to reach the service."""
    return Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)


def patiently(
    call: Callable[[], T], what: str, *, patience_s: float | None, sleep: Callable[[float], None]
) -> T:
    """Repeats a call of `LeaseClient` while the service does not answer, or fails over it.

    Args:
        call: the call.
        what: the call, as the subject of a sentence in the log.
        patience_s: seconds after which the call's error is raised; None: never.
        sleep: waits for some seconds; it may raise an exception to end the retries.

    Raises:
        ServiceUnreachableError: the time is over.
        ServiceFailedError: likewise.
    """
    outage, backoff = OutageLog(_LOG, what), pauses()
    give_up_at = math.inf if patience_s is None else time.monotonic() + patience_s
    while True:
        try:
            answer = call()
        except (ServiceUnreachableError, ServiceFailedError) as error:
            pause_s = backoff.take()
            if time.monotonic() + pause_s >= give_up_at:
                raise
            outage.failed(f"{what} is tried again", error)
            sleep(pause_s)
        else:
            outage.worked()
            return answer


def _detail(answer: httpx.Response) -> str:
    """The detail of a problem document, or else the start of the text."""
    try:
        problem = answer.json()
        return str(problem.get("detail") or problem.get("title") or problem)[:500]
    except (ValueError, AttributeError):
        return answer.text[:200]

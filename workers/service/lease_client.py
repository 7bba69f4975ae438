"""The worker's requests to the service: errors by status, retries, and the worker protocol."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import httpx

from layout_tuner.errors import ServiceUnansweredError
from layout_tuner.protocol.connection.backoff import Backoff
from layout_tuner.protocol.connection.http_connection import (
    TEMPORARY,
    TOO_MANY_REQUESTS,
    ServiceConnection,
)
from layout_tuner.protocol.connection.kept_sign_in import KeptSignIn
from layout_tuner.protocol.connection.outage_log import OutageLog
from layout_tuner.protocol.connection.tls import trusting
from layout_tuner.protocol.worker_messages import (
    HeartbeatBody,
    HeartbeatReply,
    LeaseRead,
    LeaseRequest,
    OutcomeReport,
    SetAside,
    WorkerCreate,
    WorkerCreated,
)
from layout_tuner.workers.errors import (
    AnswerUnreadableError,
    ContentRefusedError,
    RequestRefusedError,
    ServiceFailedError,
    ServiceUnreachableError,
    TokenRefusedError,
    WorkerError,
    WorkerReplacedError,
    WorkerUnknownError,
)

ANSWER_WITHIN_S: Final = 10.0
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
_AWAY: Final = TEMPORARY | {408, TOO_MANY_REQUESTS}
"""Statuses of a service, or of a proxy in front of it, that can't answer for the moment."""
_OF_CONTENT: Final = (400, 413, 422)
"""Statuses of a body that is malformed, too large or contradicts something."""

OVER_AFTER_S: Final = 6.0
"""Seconds without a failure after which an outage is over; longer than the pause between two tries:
while heartbeats are answered, leases may still be refused."""

_log: Final = logging.getLogger(__name__)

_REGISTERED_WITHIN_S: Final = 60.0
"""Long, since the service may still act on a registration that timed out, and so end the session of
the next one."""


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

    def __init__(
        self, url: str, token: str | KeptSignIn, *, certificate: Path | None = None
    ) -> None:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedOutcome:
    """An outcome as it is posted; the worker has checked it, and the service checks it again."""

    trial_id: int
    attempt: int
    body: bytes

    @classmethod
    def of(cls, report: OutcomeReport) -> Self:
        """Encodes an outcome."""
        document = asdict(report) | {"outcome": report.outcome.to_mapping()}
        trial_id = document.pop("trial_id")
        body = json.dumps(document).encode()
        return cls(trial_id=trial_id, attempt=report.attempt, body=body)


class LeaseClient(ServiceHttp):
    """A client of the worker protocol. Threads may share it.

    It logs the start and the end of each outage of the service once, for all threads; a failure of
    `role` is not logged as an outage.

    Every method raises the errors of `ServiceHttp.request`. Methods about a session also raise
    WorkerUnknownError where it has ended, and WorkerReplacedError where another has its name.

    Raises:
        UrlInvalidError: at construction.
    """

    def __init__(self, url: str, token: str, *, certificate: Path | None = None) -> None:
        super().__init__(url, token, certificate=certificate)
        self._outage = OutageLog(
            _log,
            f"the service at {self.url}",
            most_reasons=2,  # it is away, and it refuses the token
            settled_after_s=OVER_AFTER_S,
        )
        self._has_worked = False

    def register(self, worker: WorkerCreate) -> WorkerCreated:
        """Begins a session; an earlier one of the same name ends."""
        answer = self._call("POST", "/v1/workers", asdict(worker), within_s=_REGISTERED_WITHIN_S)
        return self.read(
            answer,
            lambda: WorkerCreated(
                worker_id=answer["worker_id"],
                heartbeat_interval_s=float(answer["heartbeat_interval_s"]),
                lease_s=float(answer["lease_s"]),
                quarantined=_set_aside(answer["quarantined"]),
            ),
        )

    def register_patiently(
        self, worker: WorkerCreate, *, patience_s: float, sleep: Callable[[float], None]
    ) -> WorkerCreated:
        """Begins a session; tries again while the service does not answer, or fails over it.

        After `patience_s` it raises the error of the last try. `sleep` waits between two tries, and
        may raise an exception to end them.
        """
        outage, backoff = OutageLog(_log, "registering"), pauses()
        give_up_at = time.monotonic() + patience_s
        while True:
            try:
                registration = self.register(worker)
            except (ServiceUnreachableError, ServiceFailedError) as error:
                pause_s = backoff.take()
                if time.monotonic() + pause_s >= give_up_at:
                    raise
                outage.failed("registering is tried again", error)
                sleep(pause_s)
            else:
                outage.worked()
                return registration

    def lease(self, worker_id: str, request: LeaseRequest) -> LeaseRead | None:
        """Leases a trial; None where there was none in time."""
        within_s = ANSWER_WITHIN_S + request.wait_s
        answer = self._request_of_worker(
            worker_id, "POST", "/leases", asdict(request), within_s=within_s
        )
        leases = self.read(answer, lambda: [_lease(lease) for lease in answer["leases"]])
        return leases[0] if leases else None

    def heartbeat(
        self, worker_id: str, heartbeat: HeartbeatBody, *, within_s: float = ANSWER_WITHIN_S
    ) -> HeartbeatReply:
        """Extends the leases of the trials."""
        body = asdict(heartbeat)
        answer = self._request_of_worker(worker_id, "POST", "/heartbeats", body, within_s=within_s)
        return self.read(
            answer,
            lambda: HeartbeatReply(
                stop=tuple(int(trial_id) for trial_id in answer["stop"]),
                release=tuple(str(name) for name in answer["release"]),
                quarantine=_set_aside(answer["quarantine"]),
            ),
        )

    def post_outcome(self, outcome: EncodedOutcome) -> bool:
        """Posts an outcome, which may be repeated; returns whether the service used it."""
        answer = self._call("POST", f"/v1/trials/{outcome.trial_id}/outcome", outcome.body)
        is_used = self.read(answer, lambda: bool(answer["accepted"]))
        if not is_used:
            why = answer["reason"]
            _log.warning("the outcome of trial id %d was dropped: %s", outcome.trial_id, why)
        return is_used

    def unregister(self, worker_id: str) -> None:
        """Ends the session, which returns its leases."""
        self._request_of_worker(worker_id, "DELETE", "", None)

    def _request_of_worker(
        self,
        worker_id: str,
        method: str,
        path: str,
        body: Any,
        *,
        within_s: float = ANSWER_WITHIN_S,
    ) -> Any:
        try:
            return self._call(method, f"/v1/workers/{worker_id}{path}", body, within_s=within_s)
        except NotFoundError as error:
            raise WorkerUnknownError(str(error)) from error
        except ConflictError as error:
            raise WorkerReplacedError(f"{error}; give this one a name with --name") from error

    def _call(self, method: str, path: str, body: Any, *, within_s: float = ANSWER_WITHIN_S) -> Any:
        """Sends a request; notes for the log of outages whether it was answered."""
        try:
            answer = self.request(method, path, body, within_s=within_s)
        except (ServiceUnreachableError, TokenRefusedError) as error:
            # With a token that is refused from the start, the worker ends at once with the error.
            if self._has_worked or isinstance(error, ServiceUnreachableError):
                self._outage.failed(
                    f"{error}; outcomes are kept until they can be posted",
                    cause=type(error).__name__,
                )
            error.is_logged = True
            raise
        except AnswerUnreadableError:  # the answer may be that of a proxy, so it does not count
            raise
        except WorkerError:
            self._note_answer()
            raise
        self._note_answer()
        return answer

    def _note_answer(self) -> None:
        self._has_worked = True
        self._outage.worked()


def _lease(document: Mapping[str, Any]) -> LeaseRead:
    """A lease; fields of a newer service are ignored."""
    known = {each.name: document[each.name] for each in fields(LeaseRead)}
    return LeaseRead(
        **{**known, "lease_expires_at": datetime.fromisoformat(known["lease_expires_at"])}
    )


def _set_aside(documents: Any) -> tuple[SetAside, ...]:
    return tuple(
        SetAside(node=str(document["node"]), reason=str(document["reason"]))
        for document in documents
    )


def pauses() -> Backoff:
    """The pauses of a loop between its tries to reach the service."""
    return Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)


def _detail(answer: httpx.Response) -> str:
    """The detail of a problem document, or else the start of the text."""
    try:
        problem = answer.json()
        return str(problem.get("detail") or problem.get("title") or problem)[:500]
    except (ValueError, AttributeError):
        return answer.text[:200]

"""The worker's client of the worker protocol, which logs the outages of the service."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

from search_spaces.connection.outage_log import OutageLog
from search_spaces.protocol.worker_messages import (
    HeartbeatBody,
    HeartbeatReply,
    LeaseRead,
    LeaseRequest,
    OutcomeReport,
    SetAside,
    WorkerCreate,
    WorkerCreated,
)
from workers.errors import (
    AnswerUnreadableError,
    ServiceUnreachableError,
    TokenRefusedError,
    WorkerError,
    WorkerReplacedError,
    WorkerUnknownError,
)
from workers.service.http import ANSWER_WITHIN_S, ConflictError, NotFoundError, ServiceHttp

OVER_AFTER_S: Final = 6.0
"""Seconds without a failure after which an outage is over; longer than the pause between two tries:
while heartbeats are answered, leases may still be refused."""

_log: Final = logging.getLogger(__name__)

_REGISTERED_WITHIN_S: Final = 60.0
"""Long, since the service may still act on a registration that timed out, and so end the session of
the next one."""


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

    Every method raises the errors of `ServiceHttp.request`.

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

    def lease(self, worker_id: str, request: LeaseRequest) -> LeaseRead | None:
        """Leases a trial; None where there was none in time.

        Raises:
            WorkerUnknownError: the session has ended.
            WorkerReplacedError: another worker has taken the name over.
        """
        within_s = ANSWER_WITHIN_S + request.wait_s
        answer = self._request_of_worker(
            worker_id, "POST", "/leases", asdict(request), within_s=within_s
        )
        leases = self.read(answer, lambda: [_lease(lease) for lease in answer["leases"]])
        return leases[0] if leases else None

    def heartbeat(
        self, worker_id: str, heartbeat: HeartbeatBody, *, within_s: float = ANSWER_WITHIN_S
    ) -> HeartbeatReply:
        """Extends the leases of the trials.

        Raises:
            WorkerUnknownError: the session has ended.
            WorkerReplacedError: another worker has taken the name over.
        """
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
        """Ends the session, which returns its leases; WorkerUnknownError if it has ended."""
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

"""The worker's side of the worker protocol: outbound HTTP with a bearer token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from workers.errors import WorkerSupersededError, WorkerUnknownError
from workers.protocol import (
    Beat,
    HeartbeatAnswer,
    Lease,
    LeaseAsk,
    NodeWish,
    OutcomeReport,
    Registration,
    WorkerIdentity,
    WorkerStatus,
)
from workers.service_http import ANSWER_WITHIN_S, ConflictError, NotFoundError, ServiceHttp

_REGISTERED_WITHIN_S: Final = 60.0
"""A registration that is given up and heard all the same would end the session of the next one."""


class LeaseClient:
    """Speaks the worker protocol with one service. Threads may share it.

    Every method raises `ServiceUnreachableError` when the service is away, `ServiceFailedError`
    when it broke down over the request, `TokenRefusedError` when it does not accept the token,
    `AnswerUnreadableError` when what answers is something else, and `RequestRefusedError` when it
    refuses for good.

    Raises:
        UrlInvalidError: at construction.
    """

    def __init__(self, url: str, token: str, *, certificate: Path | None = None) -> None:
        self._http = ServiceHttp(url, token, certificate=certificate)

    @property
    def url(self) -> str:
        """Of the service."""
        return self._http.url

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._http.close()

    def register(self, worker: WorkerIdentity) -> Registration:
        """Begins a session; an earlier one of the same name ends."""
        said = _said(asdict(worker))
        answer = self._http.request("POST", "/v1/workers", said, within_s=_REGISTERED_WITHIN_S)
        return self._http.read(
            answer,
            lambda: Registration(
                worker_id=answer["worker_id"],
                heartbeat_interval_s=float(answer["heartbeat_interval_s"]),
                quarantined=_wishes(answer.get("quarantined")),
            ),
        )

    def lease(self, worker_id: str, ask: LeaseAsk) -> Lease | None:
        """A trial to run; None when there was none in time.

        Raises:
            WorkerUnknownError: the session has ended.
            WorkerSupersededError: another worker has taken the name over.
        """
        body = {"max_trials": 1, **_said(asdict(ask))}
        within_s = ANSWER_WITHIN_S + ask.wait_s
        answer = self._request_of_worker(worker_id, "POST", "/leases", body, within_s=within_s)
        fields = Lease.__dataclass_fields__
        leases = self._http.read(
            answer,
            lambda: [Lease(**{name: lease[name] for name in fields}) for lease in answer["leases"]],
        )
        return leases[0] if leases else None

    def heartbeat(
        self,
        worker_id: str,
        beats: Sequence[Beat],
        status: WorkerStatus | None = None,
        *,
        within_s: float = ANSWER_WITHIN_S,
    ) -> HeartbeatAnswer:
        """Extends the leases of the trials.

        Raises:
            WorkerUnknownError: the session has ended.
            WorkerSupersededError: another worker has taken the name over.
        """
        body: dict[str, Any] = {"trials": [_said(asdict(beat)) for beat in beats]}
        if status is not None:
            body["status"] = asdict(status)
        answer = self._request_of_worker(worker_id, "POST", "/heartbeats", body, within_s=within_s)
        return self._http.read(
            answer,
            lambda: HeartbeatAnswer(
                stop=tuple(int(trial_id) for trial_id in answer["stop"]),
                release=tuple(str(name) for name in answer.get("release") or ()),
                quarantine=_wishes(answer.get("quarantine")),
            ),
        )

    def post_outcome(self, report: OutcomeReport) -> bool:
        """Posts an outcome, as often as need be; returns whether it still mattered."""
        body = _said(asdict(report))
        path = f"/v1/trials/{body.pop('trial_id')}/outcome"
        answer = self._http.request("POST", path, body)
        return self._http.read(answer, lambda: bool(answer["accepted"]))

    def unregister(self, worker_id: str) -> None:
        """Ends the session; its leases return at once.

        Raises:
            WorkerUnknownError: it has ended already.
        """
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
            return self._http.request(
                method, f"/v1/workers/{worker_id}{path}", body, within_s=within_s
            )
        except NotFoundError as error:
            raise WorkerUnknownError(str(error)) from error
        except ConflictError as error:
            raise WorkerSupersededError(f"{error}; give this one a name with --name") from error


def _said(document: dict[str, Any]) -> dict[str, Any]:
    """What is said of a document: a service of an older version does not know the rest."""
    return {name: value for name, value in document.items() if value is not None and value != ()}


def _wishes(documents: Any) -> tuple[NodeWish, ...]:
    return tuple(
        NodeWish(node=str(document["node"]), reason=str(document["reason"]))
        for document in documents or ()
    )

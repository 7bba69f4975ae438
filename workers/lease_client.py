"""The worker's side of the worker protocol: outbound HTTP with a bearer token."""

from __future__ import annotations

import ipaddress
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import httpx

from workers.errors import (
    RequestRefusedError,
    ServiceFailedError,
    ServiceUnreachableError,
    TokenRefusedError,
    UrlInvalidError,
    WorkerSupersededError,
    WorkerUnknownError,
)

_LOG = logging.getLogger(__name__)

_CONNECT_WITHIN_S: Final = 5.0
_ANSWER_WITHIN_S: Final = 10.0
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
_AWAY: Final = frozenset({408, 429, 502, 503, 504})
"""Answers of a service, or of a proxy before it, that can't work for the moment."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerIdentity:
    """How a worker introduces itself."""

    name: str
    """Registering a name again ends its earlier session."""
    host: str
    """Where it runs."""
    cluster: str
    """Only campaigns of this cluster's name are leased to it."""
    num_nodes: int
    """Nodes of its allocation."""
    devices_per_node: int
    """Devices of each."""
    device: str
    """What one device is."""
    versions: Mapping[str, str]
    """Software, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """A session of this worker with the service."""

    worker_id: str
    """To be sent with every request; it is unknown again once another session has begun."""
    heartbeat_interval_s: float
    """Seconds between heartbeats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A trial that this worker shall run."""

    trial_id: int
    attempt: int
    campaign: str
    number: int
    """The trial's number in its campaign."""
    request: Mapping[str, Any]
    """A `ProbeRequest` document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """How far a leased trial is."""

    trial_id: int
    attempt: int
    iterations_done: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeReport:
    """The outcome of one attempt at a trial."""

    trial_id: int
    attempt: int
    worker_id: str
    outcome: Mapping[str, Any]
    """An `Outcome` document."""


class LeaseClient:
    """Speaks the worker protocol with one service. Threads may share it.

    Every method raises `ServiceUnreachableError` when the service is away, `ServiceFailedError`
    when it broke down over the request, `TokenRefusedError` when it does not accept the token, and
    `RequestRefusedError` when it refuses for good.

    Raises:
        UrlInvalidError: at construction.
    """

    def __init__(self, url: str, token: str) -> None:
        _refuse_unless_http(url)
        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {token}"},
            trust_env=not _is_loopback(self.url),  # a proxy can't reach our own loopback
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._http.close()

    def register(self, worker: WorkerIdentity) -> Registration:
        """Begins a session; an earlier one of the same name ends."""
        answer = self._request("POST", "/v1/workers", asdict(worker))
        return self._read(
            answer,
            lambda: Registration(
                worker_id=answer["worker_id"],
                heartbeat_interval_s=float(answer["heartbeat_interval_s"]),
            ),
        )

    def lease(self, worker_id: str, *, wait_s: float) -> Lease | None:
        """A trial to run; None when there was none within `wait_s`.

        Raises:
            WorkerUnknownError: the session has ended.
            WorkerSupersededError: another worker has taken the name over.
        """
        body = {"max_trials": 1, "wait_s": wait_s}
        within_s = _ANSWER_WITHIN_S + wait_s
        answer = self._request_of_worker(worker_id, "POST", "/leases", body, within_s=within_s)
        fields = Lease.__dataclass_fields__
        leases = self._read(
            answer,
            lambda: [Lease(**{name: lease[name] for name in fields}) for lease in answer["leases"]],
        )
        return leases[0] if leases else None

    def heartbeat(
        self, worker_id: str, beats: Sequence[Beat], *, within_s: float = _ANSWER_WITHIN_S
    ) -> list[int]:
        """Extends the leases of the trials; returns the ids of those to stop.

        Raises:
            WorkerUnknownError: the session has ended.
            WorkerSupersededError: another worker has taken the name over.
        """
        body = {"trials": [asdict(beat) for beat in beats]}
        answer = self._request_of_worker(worker_id, "POST", "/heartbeats", body, within_s=within_s)
        return self._read(answer, lambda: [int(trial_id) for trial_id in answer["stop"]])

    def post_outcome(self, report: OutcomeReport) -> bool:
        """Posts an outcome, as often as need be; returns whether it still mattered."""
        body = {
            "worker_id": report.worker_id,
            "attempt": report.attempt,
            "outcome": report.outcome,
        }
        answer = self._request("POST", f"/v1/trials/{report.trial_id}/outcome", body)
        return self._read(answer, lambda: bool(answer["accepted"]))

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
        within_s: float = _ANSWER_WITHIN_S,
    ) -> Any:
        try:
            return self._request(method, f"/v1/workers/{worker_id}{path}", body, within_s=within_s)
        except _NotFoundError as error:
            raise WorkerUnknownError(str(error)) from error
        except _ConflictError as error:
            raise WorkerSupersededError(f"{error}; give this one a name with --name") from error

    def _request(
        self, method: str, path: str, body: Any, *, within_s: float = _ANSWER_WITHIN_S
    ) -> Any:
        content = None if body is None else json.dumps(body).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            timeout = httpx.Timeout(within_s, connect=min(within_s, _CONNECT_WITHIN_S))
            answer = self._http.request(
                method, path, content=content, headers=headers, timeout=timeout
            )
        except httpx.RequestError as error:
            raise ServiceUnreachableError(
                f"the service at {self.url} does not answer ({error or type(error).__name__})"
            ) from error
        if answer.is_success:
            return self._read(answer, lambda: answer.json() if answer.content else None)
        raise self._refusal(answer)

    def _refusal(self, answer: httpx.Response) -> Exception:
        said = f"the service at {self.url} answered {answer.status_code}: {_detail(answer)}"
        if answer.status_code in (401, 403):
            return TokenRefusedError(f"{said}; check the token file")
        if answer.status_code == 404:
            return _NotFoundError(said)
        if answer.status_code == 409:
            return _ConflictError(said)
        if answer.status_code in _AWAY:
            return ServiceUnreachableError(said)
        if answer.is_server_error:
            return ServiceFailedError(said)
        return RequestRefusedError(said)

    def _read(self, answer: Any, reading: Callable[[], T]) -> T:
        try:
            return reading()
        except (KeyError, TypeError, ValueError) as error:
            raise RequestRefusedError(
                f"what answers at {self.url} does not speak the worker protocol ({answer!r}); "
                "check the URL, and that service and worker are of the same version"
            ) from error


class _NotFoundError(RequestRefusedError):
    """404: what it means depends on what was asked for."""


class _ConflictError(RequestRefusedError):
    """409, of which the same is true."""


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


def _refuse_unless_http(url: str) -> None:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
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

"""The lease client says which of four things went wrong, and never hides a fifth.

`tests/api/routes/test_worker_protocol.py` has it speak to a real service.
"""

from __future__ import annotations

import socket
from datetime import UTC, datetime

import pytest

from search_spaces.protocol.worker_messages import (
    HeartbeatBody,
    LeaseRequest,
    SetAside,
    WorkerCreate,
    WorkerCreated,
)
from tests.kit.fake_service import TOKEN, problem
from tests.kit.worker_loop import IDENTITY, WorkedService, make_report
from workers.backoff import Backoff
from workers.errors import (
    RequestRefusedError,
    ServiceFailedError,
    ServiceUnreachableError,
)
from workers.service.lease_client import EncodedOutcome, LeaseClient


def test_fields_of_a_newer_service_are_ignored(client: LeaseClient, service: WorkedService) -> None:
    service.quarantined = service.quarantine = [{"node": "n", "reason": "loud", "since": "now"}]
    service.add_trial(7, {"seed": 0})
    service.trials[0]["priority"] = 3
    session = client.register(IDENTITY)
    lease = client.lease(session.worker_id, LeaseRequest(wait_s=1))
    assert lease.lease_expires_at == datetime(2026, 1, 1, tzinfo=UTC)
    answer = client.heartbeat(session.worker_id, HeartbeatBody())
    assert session.quarantined == answer.quarantine == (SetAside(node="n", reason="loud"),)


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        *((status, ServiceUnreachableError, "down") for status in (408, 429, 502, 503, 504)),
        *((status, ServiceFailedError, "down") for status in (500, 501)),
        (409, RequestRefusedError, "409: trial 7 has no attempt 1"),
        (422, RequestRefusedError, "422: a number is not finite"),
    ],
)
def test_a_status_says_whether_to_ask_again(
    client: LeaseClient, service: WorkedService, status: int, error: type[Exception], words: str
) -> None:
    service.answer = lambda *_: (status, problem(words.removeprefix(f"{status}: ")))  # type: ignore[method-assign]
    with pytest.raises(error, match=words):
        client.post_outcome(EncodedOutcome.of(make_report()))


def test_a_garbled_answer_is_an_error_of_ours(client: LeaseClient, service: WorkedService) -> None:
    service.garbles = True
    with pytest.raises(ServiceUnreachableError, match="does not answer"):
        client.register(IDENTITY)


def test_nobody_listening_counts_as_away() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        LeaseClient(f"http://127.0.0.1:{port}", TOKEN) as client,
        pytest.raises(ServiceUnreachableError, match=f"127.0.0.1:{port} does not answer"),
    ):
        client.register(IDENTITY)


def test_a_service_of_another_kind_is_recognised(
    client: LeaseClient, service: WorkedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "answer", lambda *_: (200, {"hello": "world"}))
    with pytest.raises(RequestRefusedError, match="does not speak the worker protocol"):
        client.register(IDENTITY)


def test_pauses_grow_to_a_limit() -> None:
    backoff = Backoff(0.2, 5.0)
    first = [backoff.take() for _ in range(8)]
    assert first == sorted(first)
    assert first[0] == 0.2
    assert first[-1] == 5.0
    backoff.reset()
    assert backoff.take() == 0.2


def test_patience_ends_with_the_last_error() -> None:
    tries: list[float] = []

    class Away(LeaseClient):
        def register(self, worker: WorkerCreate) -> WorkerCreated:
            raise ServiceUnreachableError("away")

    with (
        Away("http://localhost", TOKEN) as client,
        pytest.raises(ServiceUnreachableError, match="away"),
    ):
        client.register_patiently(IDENTITY, patience_s=0.3, sleep=tries.append)
    assert tries == [0.2]

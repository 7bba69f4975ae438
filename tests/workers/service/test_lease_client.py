"""The lease client says which of four things went wrong, and never hides a fifth."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime

import pytest

from search_spaces.protocol.outcome import Outcome
from search_spaces.protocol.worker_messages import (
    BeatBody,
    HeartbeatBody,
    HeartbeatReply,
    LeaseRequest,
    OutcomeReport,
    SetAside,
    WorkerCreate,
)
from tests.workers.fake_service import TOKEN, FakeService, problem
from workers.backoff import Backoff
from workers.errors import (
    RequestRefusedError,
    ServiceFailedError,
    ServiceUnreachableError,
    TokenRefusedError,
    WorkerReplacedError,
    WorkerUnknownError,
)
from workers.service.http import patiently
from workers.service.lease_client import EncodedOutcome, LeaseClient

IDENTITY = WorkerCreate(
    name="w",
    host="h",
    cluster="local-cpu",
    num_nodes=1,
    devices_per_node=2,
    device="CPU core",
    versions={"python": "3.11"},
)
OUTCOME = Outcome(state="failed", reason="crashed")
REPORT = EncodedOutcome.of(
    OutcomeReport(trial_id=7, attempt=1, worker_id="session-1", outcome=OUTCOME)
)


@pytest.fixture
def client(service: FakeService) -> Iterator[LeaseClient]:
    with LeaseClient(service.url + "/", TOKEN) as client:
        yield client


def test_a_session_from_registration_to_its_end(client: LeaseClient, service: FakeService) -> None:
    session = client.register(IDENTITY)
    assert session.heartbeat_interval_s == 0.05
    assert client.lease(session.worker_id, LeaseRequest(wait_s=0)) is None
    service.add_trial(7, {"seed": 0})
    lease = client.lease(session.worker_id, LeaseRequest(wait_s=1))
    assert lease is not None
    assert (lease.trial_id, lease.attempt, lease.campaign, lease.number) == (7, 1, "c", 7)
    service.stop = [7]
    beat = BeatBody(trial_id=7, attempt=1, iterations_done=3)
    assert client.heartbeat(session.worker_id, HeartbeatBody(trials=[beat])) == HeartbeatReply(
        stop=(7,)
    )
    assert client.post_outcome(REPORT)
    client.unregister(session.worker_id)
    assert service.registrations[0]["versions"] == {"python": "3.11"}
    assert service.heartbeats[0] == {"trials": [asdict(beat)], "status": None}
    assert service.outcomes[0] == {
        "worker_id": "session-1",
        "attempt": 1,
        "outcome": OUTCOME.to_mapping(),
        "nodes_held": None,
        "iterations_s": None,
        "trial_id": 7,
    }


def test_fields_of_a_newer_service_are_ignored(client: LeaseClient, service: FakeService) -> None:
    service.quarantined = service.quarantine = [{"node": "n", "reason": "loud", "since": "now"}]
    service.add_trial(7, {"seed": 0})
    service.trials[0]["priority"] = 3
    session = client.register(IDENTITY)
    lease = client.lease(session.worker_id, LeaseRequest(wait_s=1))
    assert lease is not None
    assert lease.lease_expires_at == datetime(2026, 1, 1, tzinfo=UTC)
    answer = client.heartbeat(session.worker_id, HeartbeatBody())
    assert session.quarantined == answer.quarantine == (SetAside(node="n", reason="loud"),)


def test_an_ended_session_is_unknown(client: LeaseClient) -> None:
    with pytest.raises(WorkerUnknownError, match="there is no worker long-gone"):
        client.lease("long-gone", LeaseRequest(wait_s=0))


def test_a_wrong_token_is_told_from_everything_else(service: FakeService) -> None:
    with (
        LeaseClient(service.url, "wrong") as client,
        pytest.raises(TokenRefusedError, match="the token is unknown; check the token file"),
    ):
        client.register(IDENTITY)


def test_a_service_in_trouble_counts_as_away(client: LeaseClient, service: FakeService) -> None:
    service.away = True
    with pytest.raises(ServiceUnreachableError, match="503: down for a moment"):
        client.register(IDENTITY)


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504])
def test_what_passes_by_itself_counts_as_away(
    client: LeaseClient, service: FakeService, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(service, "answer", lambda *_: (status, None))
    with pytest.raises(ServiceUnreachableError, match=f"answered {status}"):
        client.post_outcome(REPORT)


@pytest.mark.parametrize("status", [500, 501])
def test_a_service_that_breaks_down_over_a_request_is_not_away(
    client: LeaseClient, service: FakeService, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setattr(service, "answer", lambda *_: (status, None))
    with pytest.raises(ServiceFailedError, match=f"answered {status}"):
        client.post_outcome(REPORT)


def test_a_session_that_another_has_taken_over_is_no_unknown_one(
    client: LeaseClient, service: FakeService
) -> None:
    session = client.register(IDENTITY)
    client.register(IDENTITY)
    sentence = "another worker has registered as w; give this one a name with --name"
    with pytest.raises(WorkerReplacedError, match=sentence):
        client.heartbeat(session.worker_id, HeartbeatBody())
    with pytest.raises(WorkerReplacedError, match=sentence):
        client.lease(session.worker_id, LeaseRequest(wait_s=0))


def test_an_outcome_of_an_attempt_that_never_was_is_refused_for_good(
    client: LeaseClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "answer", lambda *_: (409, problem("trial 7 has no attempt 1")))
    with pytest.raises(RequestRefusedError, match="409: trial 7 has no attempt 1"):
        client.post_outcome(REPORT)


def test_an_answer_that_can_not_be_decoded_is_an_error_of_ours(
    client: LeaseClient, service: FakeService
) -> None:
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


def test_a_refused_outcome_says_why(client: LeaseClient, service: FakeService) -> None:
    service.refuse_outcomes = True
    with pytest.raises(RequestRefusedError, match="422: a number is not finite"):
        client.post_outcome(REPORT)


def test_a_service_of_another_kind_is_recognised(
    client: LeaseClient, service: FakeService, monkeypatch: pytest.MonkeyPatch
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

    def fail() -> None:
        raise ServiceUnreachableError("away")

    with pytest.raises(ServiceUnreachableError, match="away"):
        patiently(fail, "registering", patience_s=0.3, sleep=tries.append)
    assert tries == [0.2]

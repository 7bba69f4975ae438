"""The lease client says which of four things went wrong, and never hides a fifth.

A worker logs one line when its service goes away and one when it is back, over all its loops.
`tests/api/routes/test_worker_routes.py` has the client speak to a real service.
"""

from __future__ import annotations

import logging
import re
import socket
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest

from layout_tuner.protocol.connection.backoff import Backoff
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.protocol.worker_messages import (
    HeartbeatBody,
    LeaseRequest,
    SetAside,
    WorkerCreate,
    WorkerCreated,
)
from layout_tuner.workers.errors import (
    RequestRefusedError,
    ServiceFailedError,
    ServiceUnreachableError,
    TokenRefusedError,
)
from layout_tuner.workers.launchers.launcher_nodes import Cancelled, OnEvent
from layout_tuner.workers.service.lease_client import EncodedOutcome, LeaseClient
from tests.kit.fake_launcher import FakeLauncher
from tests.kit.fake_service import TOKEN, problem
from tests.kit.worker_loop import DONE, IDENTITY, WorkedService, launcher_of, make_report


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
    service.answer = lambda *_: (status, problem(words.removeprefix(f"{status}: ")))
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


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]


class Refusals:
    """Counts what is asked for of a service that answers nothing but one status."""

    def __init__(self, service: WorkedService) -> None:
        self.status: int | None = None
        self.asked: list[str] = []
        service.intercept(self._refuse)

    def _refuse(self, path: list[str], _body: Any) -> tuple[int, Any] | None:
        if self.status is None:
            return None
        self.asked.append(path[-1])
        return self.status, {"detail": "down for a moment"}

    def have_met_all_loops(self) -> bool:
        return all(self.asked.count(one) >= 3 for one in ("leases", "heartbeats", "outcome"))


@pytest.mark.slow
def test_a_service_that_goes_away_and_comes_back_is_two_lines_of_a_worker_with_three_loops(
    service: WorkedService, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = Refusals(service)
    # Short pauses: all three loops shall meet the outage, leases although an outcome waits.
    monkeypatch.setattr("layout_tuner.workers.worker.leasing._CATCH_UP_WITHIN_S", 0.05)
    for limit in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(f"layout_tuner.workers.service.lease_client.{limit}", 0.05)
    service.add(1, num_devices=1)

    def run(_on_event: OnEvent, _cancelled: Cancelled) -> Outcome:
        refusals.status = 503
        return DONE

    def watch() -> bool:
        if refusals.have_met_all_loops():
            refusals.status = None
        return "works again after" in caplog.text

    service.share(FakeLauncher(run), until=watch)
    assert set(service.posted()) == {1}
    start, end = warnings(caplog)
    at = f"the service at {service.url}"
    assert f"{at} answered 503: down for a moment; outcomes are kept" in start
    assert re.match(rf"{re.escape(at)} works again after \d+\.\d s \(failed attempts", end)


def test_a_heartbeat_that_is_refused_again_and_again_is_two_lines(
    service: WorkedService, caplog: pytest.LogCaptureFixture
) -> None:
    broken: list[str] = []

    def break_down(path: list[str], _body: Any) -> tuple[int, Any] | None:
        if path[-1] not in ("leases", "heartbeats") or broken.count(path[-1]) == 3:
            return None
        broken.append(path[-1])
        return 500, {"detail": f"a bug ({len(broken) % 2})"}

    service.add(1)
    service.intercept(break_down)
    service.work(launcher_of(2), until=lambda: caplog.text.count("works again after") == 2)
    for what in ("leasing trials", "the heartbeat"):
        assert sum(f"{what} works again" in line for line in warnings(caplog)) == 1
    assert len(broken) == 6
    assert len(warnings(caplog)) <= 6, "two reasons and one end each"


def test_a_service_that_is_away_at_the_start_is_two_lines(
    service: WorkedService, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layout_tuner.workers.service.lease_client.OVER_AFTER_S", 0.0)
    service.away = True

    def watch() -> bool:
        if "answered 503" in caplog.text:
            service.away = False
        return bool(service.heartbeats)

    service.work(until=watch)
    assert len(warnings(caplog)) == 2


def test_a_token_that_is_refused_from_the_start_is_an_error_and_no_warning(
    service: WorkedService, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(TokenRefusedError):
        service.work(until=lambda: False, token="wrong")
    assert warnings(caplog) == []


def test_refused_requests_among_answered_ones_are_one_outage(
    service: WorkedService,
    client: LeaseClient,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("layout_tuner.workers.service.lease_client.OVER_AFTER_S", 3600.0)
    refusals = Refusals(service)
    client.register(IDENTITY)
    for refusals.status in (503, None, 503, None, 401):
        with suppress(ServiceUnreachableError, TokenRefusedError):
            client.register(IDENTITY)
    first, second = warnings(caplog)
    assert "answered 503" in first
    assert "answered 401" in second
    assert second.split("; ")[2].startswith("outcomes are kept until ")

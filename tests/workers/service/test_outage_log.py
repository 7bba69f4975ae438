"""A worker logs one line when its service goes away and one when it is back, over all its loops."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from typing import Any

import pytest

from search_spaces.protocol.outcome import Outcome
from tests.kit.fake_launcher import FakeLauncher
from tests.kit.worker_loop import DONE, IDENTITY, WorkedService, launcher_of
from workers.errors import ServiceUnreachableError, TokenRefusedError
from workers.launchers.base import Cancelled, OnEvent
from workers.service.lease_client import LeaseClient


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
    monkeypatch.setattr("workers.worker.leasing._CATCH_UP_WITHIN_S", 0.05)
    for limit in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(f"workers.service.lease_client.{limit}", 0.05)
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
    monkeypatch.setattr("workers.service.lease_client.OVER_AFTER_S", 0.0)
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
    monkeypatch.setattr("workers.service.lease_client.OVER_AFTER_S", 3600.0)
    refusals = Refusals(service)
    client.register(IDENTITY)
    for refusals.status in (503, None, 503, None, 401):
        with suppress(ServiceUnreachableError, TokenRefusedError):
            client.register(IDENTITY)
    first, second = warnings(caplog)
    assert "answered 503" in first
    assert "answered 401" in second
    assert second.split("; ")[2].startswith("outcomes are kept until ")

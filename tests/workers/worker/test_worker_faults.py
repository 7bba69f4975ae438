"""The service, the disk or the launcher fails a worker: nothing is lost, and the worker goes on."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from search_spaces.protocol.outcome import Outcome, ProbeRequest
from tests.kit.fake_launcher import FakeLauncher
from tests.kit.waiting import wait_until
from tests.kit.worker_loop import DONE, FAILED, WorkedService, ends_when, launcher_of
from workers.launchers.base import Cancelled, OnEvent


def test_probes_go_on_while_the_service_is_away(service: WorkedService) -> None:
    service.add(1, 2, 3, num_devices=1)

    def run(_on_event: OnEvent, _cancelled: Cancelled) -> Outcome:
        # Two are on the two devices, the third is leased ahead and starts without the service.
        wait_until("all are leased", lambda: len(service.beats()) == 3 or service.away, 20)
        service.away = True
        return DONE

    def watch() -> bool:
        if len(service.kept()) == 3:
            service.away = False
        return len(service.outcomes) == 3

    service.share(FakeLauncher(run), until=watch)
    assert set(service.posted()) == {1, 2, 3}
    assert len(service.registrations) == 1


def test_a_request_that_a_proxy_answered_is_sent_again(service: WorkedService) -> None:
    """A proxy answers everything with a page of its own for a while: leases, beats and outcomes."""
    pages: list[str] = []
    most = 6

    def answer_with_a_page(path: list[str], _body: Any) -> tuple[int, str] | None:
        if path == ["v1", "workers"] or len(pages) >= most:
            return None
        pages.append(path[-1])
        return 200, "<html>maintenance</html>"

    def watch() -> bool:
        nonlocal most
        if set(service.posted()) == {1}:
            most = 12  # once more, now that an outcome is on its way
        return len(service.outcomes) == 2

    service.add(1, 2)
    service.intercept(answer_with_a_page)
    service.work(launcher_of(2), until=watch)
    assert set(service.posted()) == {1, 2}
    assert not list(service.spool_dir.glob("rejected/*")), "a page refuses nothing"


def test_a_status_that_the_service_does_not_take_costs_no_lease(service: WorkedService) -> None:
    def refuse_every_status(path: list[str], body: Any) -> tuple[int, Any] | None:
        is_status = path[-1] == "heartbeats" and body["status"] is not None
        return (422, {"detail": "the status is refused"}) if is_status else None

    service.add(1)
    service.intercept(refuse_every_status)
    service.work(launcher_of(2, ends=lambda: False), until=lambda: 1 in service.beats())


def test_a_trial_that_is_leased_again_ends_its_older_attempt(service: WorkedService) -> None:
    """The network was cut until the lease ran out: the service leases the trial once more, here."""
    service.add(1, num_devices=1)
    runs: list[int] = []
    go = threading.Event()

    def run(request: ProbeRequest, *rest: Any) -> Outcome:
        runs.append(1)
        return ends_when(go.is_set if len(runs) > 1 else lambda: False)(request, *rest)

    def watch() -> bool:
        if len(runs) == 1 and not service.trials and service.heartbeats:
            service.add_trial(1, launcher.requests[0].to_mapping(), attempt=2)
        if len(runs) == 2 and len(launcher.running) == 1:
            go.set()
        return bool(service.outcomes)

    launcher = FakeLauncher(placed=run)
    service.share(launcher, until=watch)
    (body,) = service.outcomes
    assert body["attempt"] == 2, "the older one has nothing to say"


def test_a_probe_that_hangs_does_not_keep_the_worker_for_ever(
    service: WorkedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.worker.scheduler._DRAIN_WITHIN_S", 0.3)
    end = threading.Event()

    def hang(_on_event: OnEvent, _cancelled: Cancelled) -> Outcome:
        end.wait(30)
        return FAILED

    service.add(1)
    launcher = FakeLauncher(hang)
    try:
        service.work(launcher, until=lambda: launcher.running)
        assert service.unregistered == ["session-1"]
        assert service.outcomes == []
    finally:
        end.set()


def test_an_outcome_that_waited_is_posted_before_trials_are_leased(service: WorkedService) -> None:
    """Its own trial might be: the lease ran out while the service was away."""
    told: list[str] = []

    def note(path: list[str], _body: Any) -> None:
        if not service.away and path[-1] in ("leases", "outcome"):
            told.append(path[-1])

    def go_away(_on_event: OnEvent, _cancelled: Cancelled) -> Outcome:
        service.away = True
        threading.Timer(3.0, come_back).start()
        return FAILED

    def come_back() -> None:
        told.clear()
        service.add(2)
        service.away = False

    service.intercept(note)
    service.add(1)
    service.work(go_away, until=lambda: "leases" in told and service.posted())
    assert told[0] == "outcome"

"""The service, the disk or the launcher fails a worker: nothing is lost, and the worker goes on."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from search_spaces.protocol.outcome import Outcome, ProbeRequest
from tests.kit.waiting import wait_until
from tests.workers.fake_launcher import FakeLauncher
from tests.workers.fake_service import FakeService
from tests.workers.worker.test_scheduling import (
    DONE,
    SHARED,
    completed_when,
    latest_beats,
    make_request,
    posted,
)
from tests.workers.worker.test_worker import FAILED, work
from workers.launchers.base import Cancelled, OnEvent
from workers.packing.request import Placement


def test_probes_go_on_while_the_service_is_away_and_are_reported_when_it_is_back(
    service: FakeService, tmp_path: Path
) -> None:
    for trial_id in (1, 2, 3):
        service.add_trial(trial_id, make_request(1))

    def run(_r: ProbeRequest, _p: Placement, _e: OnEvent, _c: Cancelled) -> Outcome:
        # Two are on the two devices, the third is leased ahead and starts without the service.
        wait_until("all are leased", lambda: len(latest_beats(service)) == 3 or service.away, 20)
        service.away = True
        return DONE

    def watch() -> bool:
        if len(list(tmp_path.glob("*.json"))) == 3:
            service.away = False
        return len(service.outcomes) == 3

    launcher = FakeLauncher(placed=run, sizes=(2,))
    work(service, tmp_path, launcher, until=watch, options=SHARED)
    assert set(posted(service)) == {1, 2, 3}
    assert len(service.registrations) == 1


def test_what_is_no_answer_of_the_service_is_asked_for_again(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy answers everything with a page of its own for a while: leases, beats and outcomes."""
    answer = service.answer
    pages: list[str] = []
    most = 6

    def answer_with_a_page(method: str, path: list[str], body: Any) -> tuple[int, Any]:
        if path != ["v1", "workers"] and len(pages) < most:
            pages.append(path[-1])
            return 200, "<html>maintenance</html>"
        return answer(method, path, body)

    service.add_trial(1, make_request(2))
    service.add_trial(2, make_request(2))
    monkeypatch.setattr(service, "answer", answer_with_a_page)

    def watch() -> bool:
        nonlocal most
        if set(posted(service)) == {1}:
            most = 12  # once more, now that an outcome is on its way
        return len(service.outcomes) == 2

    launcher = FakeLauncher(placed=completed_when(lambda: True), sizes=(2,))
    work(service, tmp_path, launcher, until=watch)
    assert set(posted(service)) == {1, 2}
    assert not list(tmp_path.glob("rejected/*")), "a page refuses nothing"


def test_a_service_that_breaks_down_over_leases_is_asked_again(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = service.answer
    broken: list[str] = []

    def break_down(method: str, path: list[str], body: Any) -> tuple[int, Any]:
        if path[-1] == "leases" and len(broken) < 3:
            broken.append(path[-1])
            return 500, None
        return answer(method, path, body)

    service.add_trial(1, make_request(2))
    monkeypatch.setattr(service, "answer", break_down)
    launcher = FakeLauncher(placed=completed_when(lambda: True), sizes=(2,))
    work(service, tmp_path, launcher, until=lambda: service.outcomes)
    assert len(broken) == 3


def test_a_status_that_the_service_does_not_take_costs_no_lease(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = service.answer

    def refuse_every_status(method: str, path: list[str], body: Any) -> tuple[int, Any]:
        if path[-1] == "heartbeats" and body["status"] is not None:
            return 422, {"detail": "the status is refused"}
        return answer(method, path, body)

    service.add_trial(1, make_request(2))
    monkeypatch.setattr(service, "answer", refuse_every_status)

    def is_told() -> bool:
        return any(beat["trial_id"] == 1 for body in service.heartbeats for beat in body["trials"])

    launcher = FakeLauncher(placed=completed_when(lambda: False), sizes=(2,))
    work(service, tmp_path, launcher, until=is_told)


@contextmanager
def tiny_disk(directory: Path) -> Iterator[Path]:
    """A file system of a few pages."""
    directory.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a small file system can't be mounted here: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_outcomes_are_posted_from_memory_while_the_disk_is_full(
    service: FakeService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for trial_id in (1, 2, 3):
        service.add_trial(trial_id, make_request(2))

    with tiny_disk(tmp_path / "disk") as disk:

        def fill_the_disk(_r: ProbeRequest, _p: Placement, _e: OnEvent, _c: Cancelled) -> Outcome:
            # Appended to: truncating would make room for the outcome of the trial before.
            with (disk / "ballast").open("ab", buffering=0) as file:
                try:
                    while file.write(b"x" * 4096):
                        pass
                except OSError:
                    return FAILED
            raise AssertionError("the disk has no end")

        launcher = FakeLauncher(placed=fill_the_disk, sizes=(2,))
        work(service, disk, launcher, until=lambda: len(service.outcomes) == 3)
    assert set(posted(service)) == {1, 2, 3}
    assert "No space left on device" in caplog.text


def test_a_trial_that_is_leased_again_ends_its_older_attempt(
    service: FakeService, tmp_path: Path
) -> None:
    """The network was cut until the lease ran out: the service leases the trial once more, here."""
    service.add_trial(1, make_request(1))
    runs: list[int] = []
    go = threading.Event()

    def run(request: ProbeRequest, *rest: Any) -> Outcome:
        runs.append(1)
        return completed_when(go.is_set if len(runs) > 1 else lambda: False)(request, *rest)

    def watch() -> bool:
        if len(runs) == 1 and not service.trials and service.heartbeats:
            service.add_trial(1, make_request(1), attempt=2)
        if len(runs) == 2 and len(launcher.running) == 1:
            go.set()
        return bool(service.outcomes)

    launcher = FakeLauncher(placed=run, sizes=(2,))
    work(service, tmp_path, launcher, until=watch, options=SHARED)
    (body,) = service.outcomes
    assert body["attempt"] == 2, "the older one has nothing to say"


def test_a_probe_that_hangs_does_not_keep_the_worker_for_ever(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.worker.scheduler._DRAIN_WITHIN_S", 0.3)
    end = threading.Event()

    def hang(_r: ProbeRequest, _p: Placement, _e: OnEvent, _c: Cancelled) -> Outcome:
        end.wait(30)
        return FAILED

    service.add_trial(1, make_request(2))
    launcher = FakeLauncher(placed=hang, sizes=(2,))
    try:
        work(service, tmp_path, launcher, until=lambda: launcher.running)
        assert service.unregistered == ["session-1"]
        assert service.outcomes == []
    finally:
        end.set()


def test_an_outcome_that_waited_for_the_service_is_posted_before_a_trial_is_leased(
    service: FakeService, tmp_path: Path
) -> None:
    """Its own trial might be: the lease ran out while the service was away."""
    told: list[str] = []
    answer = service.answer

    def noting(method: str, path: list[str], body: Any) -> tuple[int, Any]:
        status, answered = answer(method, path, body)
        if status == 200 and path[-1] in ("leases", "outcome"):
            told.append(path[-1])
        return status, answered

    def go_away(_r: ProbeRequest, _p: Placement, _e: OnEvent, _c: Cancelled) -> Outcome:
        service.away = True
        threading.Timer(3.0, come_back).start()
        return FAILED

    def come_back() -> None:
        told.clear()
        service.add_trial(2, make_request(2))
        service.away = False

    service.answer = noting  # type: ignore[method-assign]
    service.add_trial(1, make_request(2))
    launcher = FakeLauncher(placed=go_away, sizes=(2,))
    work(service, tmp_path, launcher, until=lambda: "leases" in told and posted(service))
    assert told[0] == "outcome"

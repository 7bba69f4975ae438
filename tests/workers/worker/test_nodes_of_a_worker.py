"""The nodes of a worker: lost, brought back, late, checked, doubted, quarantined and released."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.protocol.outcome import Outcome, ProbeRequest
from tests.kit.store import completed
from tests.kit.waiting import wait_until
from tests.workers.fake_launcher import FakeLauncher, make_node
from tests.workers.fake_service import FakeService
from tests.workers.service.test_lease_client import IDENTITY
from tests.workers.worker.test_scheduling import (
    SHARED,
    completed_when,
    latest_beats,
    make_request,
    posted,
)
from tests.workers.worker.test_worker import node_states, work
from workers.launchers.base import Cancelled, OnEvent
from workers.launchers.group_launcher import GroupLauncher
from workers.packing.request import Placement
from workers.worker.node_health import HealthReport


@pytest.mark.slow
def test_a_lost_node_is_brought_back_while_the_others_work(
    service: FakeService, tmp_path: Path
) -> None:
    launcher = FakeLauncher(placed=completed_when(lambda: True), sizes=(2, 2))
    launcher.losses[1] = "its raylet was killed"
    launcher.recover_errors = ["not yet", "not yet"]
    service.add_trial(1, make_request(2))

    def watch() -> bool:
        states = node_states(service)
        seen.add(states.get("n1", ""))
        return bool(service.outcomes) and states == {"n0": "idle", "n1": "idle"}

    seen: set[str] = set()
    work(service, tmp_path, launcher, until=watch, options=SHARED)
    assert launcher.recoveries == [1, 1, 1]
    assert seen & {"lost", "recovering"}


def test_a_trial_that_needs_lost_nodes_is_not_asked_for(
    service: FakeService, tmp_path: Path
) -> None:
    launcher = FakeLauncher(placed=completed_when(lambda: True), sizes=(2, 2))
    launcher.losses[1] = "its raylet was killed"
    launcher.recover_errors = ["not yet"] * 100
    work(service, tmp_path, launcher, until=lambda: service.asks, options=SHARED)
    assert service.asks[0]["room"] == {"nodes": 1, "devices": 2}


def test_a_trial_whose_nodes_do_not_come_back_is_given_back(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.worker.trial_book._GIVE_BACK_AFTER_S", 0.3)
    service.add_trial(1, make_request(2))
    service.add_trial(2, make_request(4, num_nodes=2))
    launcher = FakeLauncher(placed=completed_when(lambda: False), sizes=(2, 2))
    launcher.recover_errors = ["not yet"] * 100

    def watch() -> bool:
        if set(latest_beats(service)) == {1, 2}:
            launcher.losses[1] = "its raylet was killed"
        return bool(service.outcomes)

    work(service, tmp_path, launcher, until=watch, options=SHARED)
    outcome = posted(service)[2]
    assert outcome["state"] == "cancelled"
    assert "needs more nodes than are usable: 1 of 2; n1 is" in outcome["message"]


def test_a_failure_counts_when_the_other_node_is_lost_before_it_is_seen_there(
    service: FakeService, tmp_path: Path
) -> None:
    def crash_on_n0(
        request: ProbeRequest, shares: Placement, on_event: OnEvent, cancelled: Cancelled
    ) -> Outcome:
        if shares[0].node == 0:
            wait_until("the other node is busy", lambda: len(launcher.running) == 2, 20)
            return Outcome(
                state="failed", reason="crashed", message="boom", node="n0", duration_s=1.0
            )
        return completed_when(lambda: False)(request, shares, on_event, cancelled)

    service.add_trial(1, make_request(2))
    service.add_trial(2, make_request(2))
    launcher = FakeLauncher(placed=crash_on_n0, sizes=(2, 2))
    launcher.recover_errors = ["not yet"] * 100

    def watch() -> bool:
        beats = latest_beats(service)
        if any(beat["phase"] == "waiting" for beat in beats.values()):
            launcher.losses[1] = "its raylet was killed"
        return bool(service.outcomes)

    work(service, tmp_path, launcher, until=watch, options=SHARED)
    (outcome,) = posted(service).values()
    assert (outcome["reason"], outcome["message"], outcome["duration_s"]) == (
        "crashed",
        "boom",
        1.0,
    )


def test_a_failure_is_seen_on_another_node_before_it_counts(
    service: FakeService, tmp_path: Path
) -> None:
    def fail_on_n0(_r: ProbeRequest, shares: Placement, _e: OnEvent, _c: Cancelled) -> Outcome:
        if shares[0].node == 0:
            return Outcome(
                state="failed",
                reason="crashed",
                message="the node's fault",
                node="n0",
                duration_s=1.0,
            )
        return Outcome(
            state="failed", reason="crashed", message="the layout's", node="n1", duration_s=2.0
        )

    service.add_trial(1, make_request(2))
    launcher = FakeLauncher(placed=fail_on_n0, sizes=(2, 2))
    work(service, tmp_path, launcher, until=lambda: service.outcomes, options=SHARED)
    assert [placement[0].node for placement in launcher.placements] == [0, 1]
    (body,) = service.outcomes
    assert (body["outcome"]["message"], body["outcome"]["duration_s"]) == ("the layout's", 3.0)
    assert body["nodes_held"] == 1.0


def test_a_failure_that_has_no_other_node_to_be_seen_on_counts_at_once(
    service: FakeService, tmp_path: Path
) -> None:
    failed = Outcome(state="failed", reason="crashed", message="no luck", node="n0")
    service.add_trial(1, make_request(4, num_nodes=2))
    launcher = FakeLauncher(lambda *_: failed, sizes=(2, 2))
    work(service, tmp_path, launcher, until=lambda: service.outcomes, options=SHARED)
    assert len(launcher.requests) == 1


def test_a_node_that_fails_twice_what_another_completes_is_quarantined(
    service: FakeService, tmp_path: Path
) -> None:
    crashed = Outcome(state="failed", reason="crashed", message="segmentation fault", node="n0")

    def fail_on_n0(request: ProbeRequest, shares: Placement, _e: OnEvent, _c: Cancelled) -> Outcome:
        return crashed if shares[0].node == 0 else completed(request.layout)

    for trial_id in range(1, 6):
        service.add_trial(trial_id, make_request(2))
    launcher = FakeLauncher(placed=fail_on_n0, sizes=(2, 2))

    def watch() -> bool:
        if len(service.outcomes) == 5 and node_states(service).get("n0") == "quarantined":
            status = service.heartbeats[-1]["status"]["nodes"][0]
            seen.append(status["reason"])
        return bool(seen)

    seen: list[str] = []
    work(service, tmp_path, launcher, until=watch, options=SHARED)
    assert {outcome["state"] for outcome in posted(service).values()} == {"completed"}
    assert "failed trials" in seen[0]
    assert "segmentation fault" in seen[0]
    assert sum(placement[0].node == 0 for placement in launcher.placements) == 2


def make_report(failure: str = "") -> HealthReport:
    return HealthReport(
        device="cpu",
        num_devices=2,
        num_devices_seen=2,
        memory_bytes=8,
        memory_free_bytes=8,
        gemm_tflops=(1.0, math.nan),
        failure=failure,
    )


def test_a_node_is_checked_before_its_first_probe_and_when_it_is_released(
    service: FakeService, tmp_path: Path
) -> None:
    checked: list[tuple[int, ...]] = []

    def check(
        _launcher: GroupLauncher,
        nodes: Sequence[int],
        _cancelled: Cancelled,
        known: Mapping[int, HealthReport],
    ) -> dict[int, HealthReport]:
        checked.append(tuple(nodes))
        wait_until("checking is seen", lambda: "checking" in node_states(service).values(), 10)
        bad = "it smells" if len(checked) == 1 else ""
        return {node: make_report(bad if node == 1 else "") for node in nodes}

    def watch() -> bool:
        states = node_states(service)
        if states == {"n0": "idle", "n1": "quarantined"} and not seen:
            seen.append(service.heartbeats[-1]["status"]["nodes"][1])
            service.release = ["n1"]
        return bool(seen) and states == {"n0": "idle", "n1": "idle"}

    seen: list[dict[str, Any]] = []
    launcher = FakeLauncher(placed=completed_when(lambda: True), sizes=(2, 2))
    work(service, tmp_path, launcher, until=watch, options=SHARED, check=check)
    assert checked == [(0, 1), (1,)]
    assert seen[0]["reason"] == "the health check failed: it smells"
    health = service.told_health()["n1"]
    assert health["num_devices_seen"] == 2
    assert "gemm_tflops" not in health, "it is no number that JSON knows"


def test_a_check_that_breaks_down_is_no_clean_bill(service: FakeService, tmp_path: Path) -> None:
    def check(*_: object) -> dict[int, HealthReport]:
        raise ZeroDivisionError("a bug")

    def reasons() -> list[str]:
        return [n["reason"] for body in service.heartbeats[-1:] for n in body["status"]["nodes"]]

    launcher = FakeLauncher(placed=completed_when(lambda: True), sizes=(2,))
    work(
        service,
        tmp_path,
        launcher,
        until=lambda: reasons() == ["it could not be checked: a bug"],
        check=check,
    )
    assert launcher.requests == []


def test_users_quarantine_and_release_nodes(service: FakeService, tmp_path: Path) -> None:
    service.quarantine = [{"node": "n1", "reason": "smells of smoke"}]
    launcher = FakeLauncher(placed=completed_when(lambda: True), sizes=(2, 2))

    def watch() -> bool:
        states = node_states(service)
        if states.get("n1") == "quarantined" and not seen:
            status = service.heartbeats[-1]["status"]["nodes"][1]
            seen.append(status["reason"])
            service.quarantine, service.release = [], ["n1"]
        return bool(seen) and states.get("n1") == "idle"

    seen: list[str] = []
    work(service, tmp_path, launcher, until=watch, options=SHARED)
    assert seen == ["smells of smoke"]


def test_a_node_under_quarantine_stays_there_in_the_next_worker(
    service: FakeService, tmp_path: Path
) -> None:
    service.quarantined = [{"node": "n0", "reason": "failed twice"}]
    launcher = FakeLauncher(placed=completed_when(lambda: True), sizes=(2, 2))
    service.add_trial(1, make_request(2))
    work(service, tmp_path, launcher, until=lambda: service.outcomes, options=SHARED)
    assert [placement[0].node for placement in launcher.placements] == [1]


def test_a_node_that_joins_late_is_taken_up(service: FakeService, tmp_path: Path) -> None:
    launcher = FakeLauncher(placed=completed_when(lambda: True), sizes=(2,))

    def watch() -> bool:
        if node_states(service) and len(launcher.nodes) == 1:
            launcher.nodes.append(make_node("n1", 2))
        return node_states(service).get("n1") == "idle"

    work(service, tmp_path, launcher, until=watch, options=SHARED)


def test_a_trial_that_needs_nodes_which_have_yet_to_join_stays_with_the_service(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be refused for good: the worker can't tell that they will come."""
    monkeypatch.setattr("tests.workers.worker.test_worker.IDENTITY", replace(IDENTITY, num_nodes=2))
    monkeypatch.setattr("workers.worker.leasing._LONG_POLL_S", 0.2)
    launcher = FakeLauncher(placed=completed_when(lambda: True), sizes=(2,))

    def watch() -> bool:
        if service.asks and len(launcher.nodes) == 1:
            launcher.nodes.append(make_node("n1", 2))
        return any(ask["room"] is None for ask in service.asks)

    work(service, tmp_path, launcher, until=watch, options=SHARED)
    assert service.asks[0]["room"] == {"nodes": 1, "devices": 2}

"""Many trials at once over several nodes, against a real HTTP service and a launcher that obeys."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from search_spaces.protocol.outcome import Outcome, ProbeRequest
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import model_preset
from tests.kit.waiting import wait_until
from tests.workers.fake_launcher import FakeLauncher
from tests.workers.fake_service import FakeService
from tests.workers.worker.test_worker import CANCELLED, FAILED, work
from workers.launchers.base import Cancelled, OnEvent
from workers.packing.packer import Packer
from workers.packing.request import PackRequest, Placement
from workers.worker.scheduler import SchedulerOptions
from workers.worker.worker import AllocationEnd

DONE = Outcome(state="infeasible", reason="out_of_memory", message="a result that nobody doubts")
SHARED = SchedulerOptions(share_nodes=True, drain_s=0.5)


def make_request(
    num_devices: int = 1, num_nodes: int = 1, deadline_s: float = 300.0, seed: int = 0
) -> dict[str, Any]:
    layout = Layout(num_nodes=num_nodes, dp=num_devices)
    request = ProbeRequest(
        model=model_preset("tiny"), layout=layout, deadline_s=deadline_s, seed=seed
    )
    return request.to_mapping()


def posted(service: FakeService) -> dict[int, dict[str, Any]]:
    return {body["trial_id"]: body["outcome"] for body in service.outcomes}


def latest_beats(service: FakeService) -> dict[int, dict[str, Any]]:
    return {beat["trial_id"]: beat for body in service.heartbeats[-1:] for beat in body["trials"]}


def completed_when(
    condition: Callable[[], Any],
) -> Callable[[ProbeRequest, Placement, OnEvent, Cancelled], Outcome]:
    """A probe that holds its devices until a condition holds, or it is cancelled."""

    def run(_r: ProbeRequest, _p: Placement, on_event: OnEvent, cancelled: Cancelled) -> Outcome:
        on_event({"event": "iteration", "index": 0, "step_time_s": 0.01})
        wait_until("the probe may end", lambda: condition() or cancelled(), 30)
        return CANCELLED if cancelled() else DONE

    return run


def test_probes_of_different_sizes_run_side_by_side(service: FakeService, tmp_path: Path) -> None:
    sizes = {1: (4, 2), 2: (2, 1), 3: (1, 1), 4: (1, 1)}
    for trial_id, (num_devices, num_nodes) in sizes.items():
        service.add_trial(trial_id, make_request(num_devices, num_nodes))
    launcher = FakeLauncher(sizes=(2, 2, 4))
    launcher.placed = completed_when(lambda: launcher.most_at_once == 8)
    work(service, tmp_path, launcher, until=lambda: len(service.outcomes) == 4, options=SHARED)
    assert launcher.most_at_once == 8, "all of them at the same time, on devices of their own"


def test_one_trial_is_leased_ahead_while_all_devices_are_busy(
    service: FakeService, tmp_path: Path
) -> None:
    for trial_id in range(1, 6):
        service.add_trial(trial_id, make_request(2))
    go = threading.Event()
    launcher = FakeLauncher(placed=completed_when(go.is_set), sizes=(2,))

    def is_ahead() -> bool:
        phases = {i: beat["phase"] for i, beat in latest_beats(service).items()}
        return phases == {1: "iterating", 2: "waiting"}

    def watch() -> bool:
        if not go.is_set() and is_ahead():
            held = [beat["held_s"] for i, beat in latest_beats(service).items() if i == 2]
            waits.extend([*held, latest_beats(service)[2]["waiting_because"]])
            left.append(len(service.trials))
            go.set()
        return len(service.outcomes) == 5

    waits: list[Any] = []
    left: list[int] = []
    work(service, tmp_path, launcher, until=watch)
    assert left == [3], "one ahead, the others stay with the service"
    assert waits[0] == 0.0
    assert "waits for" in waits[1]
    assert [request.layout.dp for request in launcher.requests] == [2] * 5


def test_a_large_trial_that_waits_is_passed_by_small_ones_that_fit_beside_it(
    service: FakeService, tmp_path: Path
) -> None:
    service.add_trial(1, make_request(2))  # on one node, for as long as the test wants
    service.add_trial(2, make_request(4, num_nodes=2))  # needs both
    go = threading.Event()
    launcher = FakeLauncher(placed=completed_when(go.is_set), sizes=(2, 2))

    def watch() -> bool:
        rooms = [ask["room"] for ask in service.asks if ask["room"]]
        if rooms and not service.trials and not seen:
            seen.extend(rooms)
            # As long as the first one may take: the large one is not delayed.
            service.add_trial(3, make_request(2, deadline_s=5.0))
        if len(launcher.requests) == 2:
            go.set()
        return len(service.outcomes) == 3

    seen: list[dict[str, int]] = []
    work(service, tmp_path, launcher, until=watch, options=SHARED)
    assert seen[0] == {"nodes": 1, "devices": 2}
    assert [request.layout.num_nodes for request in launcher.requests] == [1, 1, 2]


def test_a_trial_that_can_not_end_in_time_is_neither_leased_nor_started(
    service: FakeService, tmp_path: Path
) -> None:
    service.add_trial(1, make_request(2, deadline_s=3000.0))
    launcher = FakeLauncher(placed=completed_when(lambda: True), sizes=(2,))
    work(
        service,
        tmp_path,
        launcher,
        until=lambda: service.outcomes,
        ends_in_s=lambda: 100.0,
    )
    assert launcher.requests == []
    (outcome,) = posted(service).values()
    assert outcome["state"] == "cancelled"
    assert "before the allocation ends" in outcome["message"]
    assert any((ask["longest_s"] or 1000) < 100 for ask in service.asks)


def test_the_worker_drains_before_its_time_is_over(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often = functools.partial(AllocationEnd, look_every_s=0.05)
    monkeypatch.setattr("workers.worker.worker.AllocationEnd", look_often)
    service.add_trial(1, make_request(2, deadline_s=0.5))
    ends_at: list[float] = []

    def ends_in_s() -> float:
        # The end moves nearer, as where an administrator shortens a job.
        if launcher.requests and not ends_at:
            ends_at.append(time.monotonic() + 6.0)
        return ends_at[0] - time.monotonic() if ends_at else 3600.0

    launcher = FakeLauncher(placed=completed_when(lambda: False), sizes=(2,))
    work(service, tmp_path, launcher, until=lambda: service.unregistered, ends_in_s=ends_in_s)
    assert launcher.requests, "it had started"
    assert service.outcomes == [], "its lease went back with the session"
    assert service.unregistered == ["session-1"]
    assert time.monotonic() < ends_at[0] + 0.5


def test_a_worker_without_work_ends_by_itself_where_it_shall(
    service: FakeService, tmp_path: Path
) -> None:
    service.add_trial(1, make_request(2))
    options = SchedulerOptions(share_nodes=False, drain_s=1.0, end_when_idle_s=0.3)
    launcher = FakeLauncher(placed=completed_when(lambda: True), sizes=(2,))
    work(service, tmp_path, launcher, until=lambda: service.unregistered, options=options)
    assert len(service.outcomes) == 1


def test_a_launcher_that_breaks_down_costs_a_trial_and_not_the_worker(
    service: FakeService, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def break_down(request: ProbeRequest, _p: Placement, _e: OnEvent, _c: Cancelled) -> Outcome:
        if request.seed == 1:
            raise ZeroDivisionError("a bug")
        return FAILED

    service.add_trial(1, make_request(2, seed=1))
    service.add_trial(2, make_request(2, seed=2))
    launcher = FakeLauncher(placed=break_down, sizes=(2,))
    work(service, tmp_path, launcher, until=lambda: len(service.outcomes) == 2)
    outcome = posted(service)[1]
    assert outcome["reason"] == "node_lost", "it says nothing about the layout"
    assert "ZeroDivisionError: a bug" in outcome["message"]
    assert posted(service)[2]["message"] == FAILED.message


def test_a_trial_of_more_devices_than_the_allocation_has_is_refused(
    service: FakeService, tmp_path: Path
) -> None:
    service.add_trial(1, make_request(8, num_nodes=2))
    launcher = FakeLauncher(placed=completed_when(lambda: True), sizes=(4, 2))
    work(service, tmp_path, launcher, until=lambda: service.outcomes, options=SHARED)
    assert launcher.requests == []
    outcome = posted(service)[1]
    assert outcome["reason"] == "unsupported"
    assert "are 4 a node, and this allocation has 1 nodes of so many devices" in outcome["message"]


def test_a_trial_is_stopped_before_it_has_devices(service: FakeService, tmp_path: Path) -> None:
    service.add_trial(1, make_request(2))
    service.add_trial(2, make_request(2))
    launcher = FakeLauncher(placed=completed_when(lambda: False), sizes=(2,))

    def watch() -> bool:
        if 2 in latest_beats(service):
            service.stop = [2]
        return bool(service.outcomes)

    work(service, tmp_path, launcher, until=watch)
    assert posted(service)[2]["state"] == "cancelled"
    assert len(launcher.requests) == 1


def test_what_waits_is_dropped_with_its_session_and_what_runs_is_reported(
    service: FakeService, tmp_path: Path
) -> None:
    service.add_trial(1, make_request(2))
    service.add_trial(2, make_request(2))
    go = threading.Event()
    launcher = FakeLauncher(placed=completed_when(go.is_set), sizes=(2,))

    def watch() -> bool:
        if set(latest_beats(service)) == {1, 2} and len(service.registrations) == 1:
            service.forget_worker()
        if len(service.registrations) == 2 and set(latest_beats(service)) == {1}:
            go.set()
        return bool(service.outcomes)

    work(service, tmp_path, launcher, until=watch)
    assert len(launcher.requests) == 1
    assert set(posted(service)) == {1}


@pytest.mark.parametrize(
    "failure",
    [
        Outcome(
            state="failed", reason="crashed", message="rank 0 was killed by signal 15 (SIGTERM)"
        ),
        Outcome(state="failed", reason="node_lost", message="the agent ended", node="n0"),
    ],
)
def test_ranks_that_hear_of_the_jobs_end_before_the_worker_teach_nothing(
    service: FakeService, tmp_path: Path, failure: Outcome
) -> None:
    """`scancel` signals every process of a job: the ranks may be the first to end."""
    ended = threading.Event()

    def end_with_the_job(*_: object) -> Outcome:
        threading.Timer(0.2, ended.set).start()
        return failure

    service.add_trial(1, make_request(2))
    launcher = FakeLauncher(placed=end_with_the_job, sizes=(2, 2))
    work(service, tmp_path, launcher, until=ended.is_set, options=SHARED)
    assert len(launcher.requests) == 1
    assert service.outcomes == []
    assert service.unregistered == ["session-1"]


def test_a_rank_that_is_terminated_alone_has_crashed(service: FakeService, tmp_path: Path) -> None:
    killed = "rank 0 was killed by signal 15 (SIGTERM)"
    failure = Outcome(state="failed", reason="crashed", message=killed)
    service.add_trial(1, make_request(2))
    launcher = FakeLauncher(placed=lambda *_: failure, sizes=(2,))
    work(service, tmp_path, launcher, until=lambda: service.outcomes)
    assert posted(service)[1]["message"] == killed


def test_idle_node_seconds_add_up(service: FakeService, tmp_path: Path) -> None:
    service.add_trial(1, make_request(1))
    launcher = FakeLauncher(placed=completed_when(lambda: False), sizes=(2, 2))

    def idle() -> list[float]:
        return [body["status"]["idle_node_s"] for body in service.heartbeats if body["trials"]]

    def free() -> list[int]:
        nodes = [body["status"]["nodes"] for body in service.heartbeats[-1:] if body["trials"]]
        return [node["free_devices"] for on_all in nodes for node in on_all]

    started = time.monotonic()
    work(
        service,
        tmp_path,
        launcher,
        until=lambda: len(idle()) > 5 and free() == [1, 2],
        options=SHARED,
    )
    assert idle() == sorted(idle())
    assert 0 < idle()[-1] < 2 * (time.monotonic() - started)


def test_how_long_a_probe_is_expected_to_take_follows_from_those_before(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WatchedPacker(Packer):
        def submit(self, request: PackRequest) -> None:
            expected.append(request.expected_s)
            super().submit(request)

    expected: list[float | None] = []
    monkeypatch.setattr("workers.worker.worker.Packer", WatchedPacker)
    for trial_id in range(1, 4):
        service.add_trial(trial_id, make_request(2, deadline_s=300.0))
    launcher = FakeLauncher(placed=lambda *_: DONE, sizes=(2,))
    work(service, tmp_path, launcher, until=lambda: len(service.outcomes) == 3)
    assert expected[0] is None
    assert expected[-1] is not None
    assert 0 < expected[-1] < 300


def test_a_campaign_that_was_deleted_and_named_again_is_another_one(
    service: FakeService, tmp_path: Path
) -> None:
    for trial_id in (1, 2):
        service.add_trial(trial_id, make_request(2))
    service.trials[1]["number"] = 1
    launcher = FakeLauncher(sizes=(2, 2))
    launcher.placed = completed_when(lambda: launcher.most_at_once == 4)
    work(service, tmp_path, launcher, until=lambda: len(service.outcomes) == 2, options=SHARED)
    assert [outcome["reason"] for outcome in posted(service).values()] == [DONE.reason] * 2

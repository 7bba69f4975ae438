"""The clock of the service's or the worker's machine jumps by an hour: the campaign goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.service.live_service import LiveProcess, LiveService, wait_until
from tests.e2e.faked_clock import Clock
from tests.e2e.held_probes import (
    LEASE_PATIENCE_S,
    PATIENCE_S,
    RANK_ENTRY,
    HeldProbes,
    assert_nothing_left,
)

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(400)]

HOUR_S = 3600
BEATS_S = 6.0
"""Some heartbeats of a worker, and sweeps of the service."""


class Scene:
    """A service and a worker, each with a clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of_service, self.of_worker = Clock(folder / "service"), Clock(folder / "worker")
        self.service = LiveService(folder, environment=self.of_service.environment)

    def start_worker(self) -> None:
        self.probes = HeldProbes(self.service)
        self.worker: LiveProcess = self.service.worker(
            rank_entry=RANK_ENTRY, environment=self.of_worker.environment
        )
        self.worker.start()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    with scene.service:
        scene.start_worker()
        yield scene
        assert_nothing_left(scene.service, scene.worker)


def let_some_beats_pass() -> None:
    until = time.monotonic() + BEATS_S
    wait_until("some beats have passed", lambda: time.monotonic() > until)


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
def test_leases_hold_while_the_service_s_clock_jumps(scene: Scene, ahead_s: int) -> None:
    trial = scene.probes.hold()
    scene.of_service.set(ahead_s)
    let_some_beats_pass()
    assert scene.service.trial(trial).trial.state == "RUNNING", scene.service.serve.said()
    scene.of_service.set(0)
    let_some_beats_pass()
    scene.probes.let_go()
    scene.service.wait_for_end([trial], PATIENCE_S)
    assert scene.service.trial(trial).trial.state == "COMPLETED"
    assert scene.probes.endings(trial) == ["reported"]


def test_a_lease_runs_out_although_the_service_s_clock_was_set_back(scene: Scene) -> None:
    trial = scene.probes.hold()
    scene.worker.kill()
    scene.of_service.set(-HOUR_S)
    scene.probes.wait_for_state(trial, "PENDING", LEASE_PATIENCE_S)
    scene.worker.start()
    scene.service.wait_for_end([trial], PATIENCE_S)
    assert scene.probes.endings(trial) == ["lost", "reported"]


@pytest.mark.parametrize("ahead_s", [HOUR_S, -HOUR_S])
def test_deadlines_hold_while_the_worker_s_clock_jumps(scene: Scene, ahead_s: int) -> None:
    trial = scene.probes.hold()
    scene.of_worker.set(ahead_s)
    let_some_beats_pass()
    assert scene.service.trial(trial).trial.state == "RUNNING", scene.worker.said()
    scene.probes.let_go()
    scene.service.wait_for_end([trial], PATIENCE_S)
    found = scene.service.trial(trial)
    assert found.trial.state == "COMPLETED", scene.worker.said()
    assert 0 < found.attempts[0].node_seconds < PATIENCE_S
    assert scene.probes.endings(trial) == ["reported"]

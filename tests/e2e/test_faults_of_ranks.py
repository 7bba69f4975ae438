"""Every way in which a rank, its parent process or its node can end, and what its trial becomes."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.service.live_service import LiveProcess, LiveService, wait_until
from benchmarks.workers.rank_faults import FAULTS, LOSES_WORKER, RankFault, fault_named, seed_of
from tests.e2e.held_probes import PATIENCE_S, RANK_ENTRY, HeldProbes, assert_nothing_left

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(400)]

SAID = {
    "raises": "this rank was told to crash",
    "floods the log": "a rank that says too much",
    "segfaults": "Segmentation fault",
}
"""What must stand in the log's tail."""


class Scene:
    """One service and one worker for all faults: each has to leave them fit for the next."""

    def __init__(self, service: LiveService) -> None:
        self.service = service
        self.probes = HeldProbes(service)
        self.worker: LiveProcess = service.worker(rank_entry=RANK_ENTRY)
        self.worker.start()
        service.wait_for_end([self.probes.add()], PATIENCE_S)

    def befall(self, fault: RankFault) -> int:
        """A probe that the fault befalls, and a healthy one after it, both at their ends."""
        trial = self.probes.add(seed_of(fault, 0), deadline="10s")
        after = self.probes.add()
        if fault.name == LOSES_WORKER:
            wait_until("the worker is gone", self.worker.has_ended, PATIENCE_S)
            self.worker.start()
        self.service.wait_for_end([trial, after], PATIENCE_S)
        assert self.service.trial(after).trial.state == "COMPLETED", self.worker.said()
        return trial


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with LiveService(tmp_path_factory.mktemp("faults")) as service:
        scene = Scene(service)
        yield scene
        assert_nothing_left(service, scene.worker)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_fault_of_a_rank_ends_its_trial_and_leaves_its_node_fit(
    fault: RankFault, scene: Scene
) -> None:
    before = len(scene.probes.ranks_and_zygotes())
    found = scene.service.trial(scene.befall(fault))
    trial = found.trial
    assert trial.reason in fault.reasons, (trial.message, scene.worker.said())
    assert trial.attempt == fault.attempts
    if trial.reason is None:
        assert trial.state == "COMPLETED"
    else:
        assert trial.state == ("INFEASIBLE" if trial.reason == "out_of_memory" else "FAILED")
        assert trial.node == socket.gethostname()
        assert trial.message
    assert SAID.get(fault.name, "") in found.log_tail
    wait_until(
        "nothing of the probe is left", lambda: len(scene.probes.ranks_and_zygotes()) <= before, 20
    )


@pytest.mark.slow
def test_a_trial_that_loses_its_node_every_time_fails_and_names_the_node(
    scene: Scene,
) -> None:
    seed = seed_of(fault_named("loses its zygote"), 1)
    trial = scene.probes.add(seed)
    for _ in range(3):
        scene.probes.wait_until_struck(seed)
        scene.probes.strike_again(seed)
    scene.service.wait_for_end([trial], PATIENCE_S)
    found = scene.service.trial(trial)
    assert (found.trial.state, found.trial.reason) == ("FAILED", "node_lost")
    assert found.trial.node == socket.gethostname()
    assert [attempt.attempt for attempt in found.attempts] == [1, 2, 3]


@pytest.mark.slow
def test_a_worker_that_was_killed_leaves_no_process_even_before_it_is_started_again(
    scene: Scene,
) -> None:
    trial = scene.probes.hold()
    pids = {process.pid for process in scene.service.processes()} - {scene.service.serve.pid}
    scene.worker.kill()
    wait_until("all of it is gone", lambda: not any(map(psutil.pid_exists, pids)), 30)
    scene.worker.start()
    scene.service.wait_for_end([trial], PATIENCE_S)
    assert scene.service.trial(trial).trial.state == "COMPLETED"
    assert scene.probes.endings(trial) == ["lost", "reported"]

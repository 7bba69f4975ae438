"""Every way in which a rank, its parent process or its node can end, and what its trial becomes."""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.service.live_service import LiveProcess, LiveService, wait_until
from benchmarks.workers.rank_faults import (
    FAULTS,
    FOLDER,
    HELD_SEED,
    LOSES_WORKER,
    RankFault,
    fault_named,
    seed_of,
)
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.e2e.held_probes import PATIENCE_S, RANK_ENTRY, HeldProbes, assert_nothing_left
from tests.workers.process_checks import command_line
from tests.workers.ray_nodes import RayNodeProcess, free_port

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
def test_three_kills_of_ray_are_no_result_and_the_campaign_says_why_it_waits(scene: Scene) -> None:
    trial = scene.probes.hold()
    campaign = f"/campaigns/{scene.service.trial(trial).trial.campaign_id}"
    why = f"(node {socket.gethostname()} was lost: "

    def waiting_reason() -> str:
        return str(scene.service.get(campaign)["progress"]["waiting_reason"])

    for kind in ("ray::RuntimeEnvAgent", "ray/raylet/raylet", "ray::RayAgent"):
        below = psutil.Process(scene.worker.pid).children(recursive=True)
        (victim,) = (process for process in below if kind in " ".join(command_line(process)))
        scene.probes.strike_again(HELD_SEED)
        scene.probes.keep_nodes_away()  # a fast machine has them back between two heartbeats
        victim.kill()
        wait_until("the campaign says why it waits", lambda: why in waiting_reason(), PATIENCE_S)
        scene.probes.let_nodes_start()
        scene.probes.wait_until_struck(HELD_SEED)
    scene.probes.let_go()
    scene.service.wait_for_end([trial], PATIENCE_S)
    found = scene.service.trial(trial).trial
    assert (found.state, found.attempt, found.lost_attempts) == ("COMPLETED", 4, 0)


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


CLUSTER: dict[str, Any] = {
    "name": "two-nodes",
    "device": "CPU core",
    "num_nodes": 2,
    "devices_per_node": 1,
    "device_memory_bytes": 4 << 30,
}
ON_BOTH = Layout(num_nodes=2, dp=2)
ON_ONE = Layout()


class Allocation:
    """Two Ray nodes of this machine, a worker that has joined them, and a service."""

    def __init__(self, service: LiveService) -> None:
        self.service, self.probes = service, HeldProbes(service, CLUSTER)
        token = secrets.token_hex(16)
        head = f"127.0.1.31:{free_port('127.0.1.31')}"
        self.nodes = [
            RayNodeProcess(
                name=f"node{number}", address=f"127.0.1.3{number}", head=head, token=token
            )
            for number in (1, 2)
        ]
        for node in self.nodes:
            node.start()
        where = ["--ray-address", head, "--num-nodes", "2", "--cluster", json.dumps(CLUSTER)]
        self.worker: LiveProcess = service.worker(
            rank_entry=RANK_ENTRY,
            environment={"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token},
            options=where,
        )
        self.worker.start()

    def states(self) -> dict[str, str]:
        """What the worker's nodes are, as the service tells users."""
        (allocation,) = self.service.get("/allocations")["allocations"]
        return {node["name"]: node["state"] for node in allocation["nodes"]}

    def wait_for_states(self, **expected: set[str]) -> None:
        def as_expected() -> bool:
            states = self.states()
            return all(states[name] in its for name, its in expected.items())

        wait_until(f"nodes are {expected}", as_expected, PATIENCE_S)


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocation]:
    monkeypatch.setenv(FOLDER, str(tmp_path / "faults"))  # ranks live below Ray's nodes
    with LiveService(tmp_path) as service:
        allocation = Allocation(service)
        try:
            yield allocation
            assert_nothing_left(service, allocation.worker)
        finally:
            for node in allocation.nodes:
                node.end()


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_node_that_dies_ends_an_attempt_and_the_other_goes_on(allocation: Allocation) -> None:
    probes, service = allocation.probes, allocation.service
    service.wait_for_end([first := probes.add(layout=ON_BOTH)], PATIENCE_S)
    assert service.trial(first).trial.state == "COMPLETED", allocation.worker.said()
    held = probes.hold(layout=ON_BOTH)
    allocation.nodes[1].kill_tree()
    wait_until("the attempt has ended", lambda: probes.endings(held)[0] == "reported", PATIENCE_S)
    allocation.wait_for_states(node1={"idle"}, node2={"lost", "recovering"})
    service.wait_for_end([small := probes.add(layout=ON_ONE)], PATIENCE_S)
    assert service.trial(small).trial.state == "COMPLETED", allocation.worker.said()
    assert service.trial(held).trial.state != "COMPLETED"
    allocation.nodes[1].start()
    service.wait_for_end([held], PATIENCE_S)
    found = service.trial(held)
    assert (found.trial.state, found.trial.lost_attempts) == ("COMPLETED", 0)
    allocation.wait_for_states(node1={"idle"}, node2={"idle"})

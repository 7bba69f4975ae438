"""A whole node of an allocation's Ray cluster dies in mid-probe and returns; the others go on."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.service.live_service import LiveProcess, LiveService, wait_until
from benchmarks.workers.rank_faults import FOLDER
from search_spaces.spec.layout import Layout
from tests.e2e.held_probes import PATIENCE_S, RANK_ENTRY, HeldProbes, assert_nothing_left
from tests.workers.ray_nodes import RayNodeProcess, free_port

pytestmark = [pytest.mark.nightly, pytest.mark.ranks, pytest.mark.timeout(600)]

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


def test_a_node_that_dies_costs_an_attempt_and_the_other_goes_on(allocation: Allocation) -> None:
    probes, service = allocation.probes, allocation.service
    service.wait_for_end([first := probes.add(layout=ON_BOTH)], PATIENCE_S)
    assert service.trial(first).trial.state == "COMPLETED", allocation.worker.said()
    held = probes.hold(layout=ON_BOTH)
    allocation.nodes[1].kill_tree()
    wait_until("the attempt is lost", lambda: service.trial(held).trial.lost_attempts, PATIENCE_S)
    allocation.wait_for_states(node1={"idle"}, node2={"lost", "recovering"})
    service.wait_for_end([small := probes.add(layout=ON_ONE)], PATIENCE_S)
    assert service.trial(small).trial.state == "COMPLETED", allocation.worker.said()
    assert service.trial(held).trial.state != "COMPLETED"
    allocation.nodes[1].start()
    service.wait_for_end([held], PATIENCE_S)
    found = service.trial(held)
    assert (found.trial.state, found.trial.lost_attempts) == ("COMPLETED", 1)
    allocation.wait_for_states(node1={"idle"}, node2={"idle"})

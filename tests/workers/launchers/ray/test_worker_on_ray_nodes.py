"""The worker as a process over two Ray nodes of this machine, each with an address of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.kit.worker_loop import WorkedService, log_of, running_worker
from tests.workers.ray_nodes import PATIENCE_S, RayNodeProcess, make_nodes

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Sequence[RayNodeProcess]]:
    processes = make_nodes("127.0.1.51", "127.0.1.52")
    for process, domain in zip(processes, ("a", "b"), strict=True):
        process.labels = f"domain={domain},zone=z"
        process.start()
    yield processes
    for process in processes:
        process.end()


def test_probes_of_one_and_of_two_nodes_run_and_the_worker_ends_when_idle(
    nodes: Sequence[RayNodeProcess], mark: str, service: WorkedService
) -> None:
    sizes = {1: (1, 1), 2: (1, 1), 3: (2, 2), 4: (2, 1)}
    for trial_id, (num_devices, num_nodes) in sizes.items():
        service.add(trial_id, num_devices=num_devices, num_nodes=num_nodes, iterations=2)
    cluster = service.spool_dir.parent / "cluster.yaml"
    levels = "[{name: node, devices: 2}, {name: domain, devices: 4}, {name: all}]"
    cluster.write_text(
        f"{{preset: local-cpu, name: two-nodes, devices_per_node: 2, levels: {levels}}}"
    )
    options = ["--cluster", str(cluster), "--share-nodes", "--nodes", "2", "--time-left", "3600"]
    options += ["--ray-address", nodes[0].head, "--end-when-idle", "3"]
    with running_worker(service, *options, RAY_AUTH_TOKEN=nodes[0].token) as worker:
        assert worker.wait(3 * PATIENCE_S) == 0
    outcomes = {body["trial_id"]: body for body in service.outcomes}
    states = {i: body["outcome"]["state"] for i, body in outcomes.items()}
    assert states == dict.fromkeys(sizes, "completed")
    held = {i: body["nodes_held"] for i, body in outcomes.items()}
    assert held == {1: 0.5, 2: 0.5, 3: 2, 4: 1}
    assert all(0 < b["iterations_s"] <= b["outcome"]["duration_s"] for b in outcomes.values())
    assert service.unregistered == ["session-1"]
    status = service.heartbeats[-1]["status"]
    (line,) = (words for words in log_of(service).read_text().splitlines() if "spans" in words)
    assert line.endswith("; spans 2 of domain (1 + 1 nodes)")
    seen = {name: told["num_devices_seen"] for name, told in service.told_health().items()}
    assert seen == {node["name"]: 2 for node in status["nodes"]}
    assert 0 < status["ends_in_s"] < 3600

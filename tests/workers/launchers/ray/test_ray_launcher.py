"""The same groups over a real Ray cluster, and what is left when its processes are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from search_spaces.presets.clusters import resolve_cluster
from tests.workers.process_checks import (
    MARK,
    RANK_PROGRAMS,
    is_alive,
    make_decoys,
    marked,
    run_group,
    wait_until,
    wait_until_gone,
)
from workers.errors import RayClusterFailedError
from workers.launchers.ray import RayNodes, ray_launcher

ROOT = Path(__file__).parents[2]

HANGING = f"""
import sys
from tests.workers.process_checks import run_group
from workers.launchers.ray import RayNodes
nodes = RayNodes(num_devices=2, rank_entry={RANK_PROGRAMS!r})
run_group(nodes, "daemonise", num_ranks=1)
run_group(nodes, "hang", on_event=lambda event: print(event["pid"], flush=True), deadline_s=100)
"""


IN_A_FULL_DIRECTORY = f"""
from tests.workers.process_checks import run_group
from workers.launchers.ray import RayNodes
nodes = RayNodes(num_devices=2, rank_entry={RANK_PROGRAMS!r})
failure = run_group(nodes, "succeed").failure
nodes.close()
assert failure is None, failure
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    nodes = RayNodes(num_devices=2, rank_entry=RANK_PROGRAMS)
    yield nodes
    pids = [pid for on_node in nodes.pids for pid in on_node.values()]
    nodes.close()
    wait_until_gone(pids)


def test_a_group_runs_over_ray_and_its_ranks_meet(nodes: RayNodes) -> None:
    end = run_group(nodes, "meet")
    assert end.failure is None
    where = {"address": nodes.nodes[0].address, "port": 4321}
    assert [end.results[rank]["told"] for rank in (0, 1)] == [where, where]


def test_the_first_failure_ends_the_group_over_ray(nodes: RayNodes) -> None:
    hanging: list[int] = []
    end = run_group(
        nodes,
        "hang",
        by_rank={"1": "fail-late"},
        on_event=lambda event: hanging.append(event["pid"]),
    )
    assert end.failure is not None
    assert end.failure.message == "rank 1: ValueError: this rank was told to fail"
    assert end.log_tail.endswith("ValueError: this rank was told to fail")
    assert end.duration_s < 1.0
    assert not any(map(is_alive, hanging))


def test_a_daemon_of_a_rank_is_gone_after_the_group_over_ray(nodes: RayNodes) -> None:
    end = run_group(nodes, "daemonise")
    assert not any(is_alive(result["daemon"]) for result in end.results.values())


def test_packages_of_our_names_where_the_worker_stands_are_left_alone(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-P", "-c", IN_A_FULL_DIRECTORY],
        cwd=make_decoys(tmp_path),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "victim",
    [
        "agent",
        pytest.param("zygote", marks=pytest.mark.slow),
        pytest.param("raylet", marks=pytest.mark.slow),
    ],
)
def test_sigkill_on_a_node_leaves_no_rank_and_the_cluster_recovers(
    nodes: RayNodes, victim: str
) -> None:
    pids = dict(nodes.pids[0])
    pids["raylet"] = psutil.Process(pids["agent"]).ppid()
    assert psutil.Process(pids["raylet"]).name() == "raylet"
    hanging: list[int] = []

    def kill_when_all_hang(event: dict[str, Any]) -> None:
        hanging.append(event["pid"])
        if len(hanging) == 2:
            os.kill(pids[victim], signal.SIGKILL)

    end = run_group(nodes, "hang", on_event=kill_when_all_hang)
    assert end.failure is not None
    assert end.failure.reason == "node_lost"
    wait_until_gone([*hanging, pids["warden"], pids["zygote"]], 2)
    handler = signal.getsignal(signal.SIGTERM)
    nodes.recover(0)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert run_group(nodes, "succeed").failure is None


def test_a_cluster_can_not_be_joined_without_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    frontier, _ = resolve_cluster("frontier")
    with pytest.raises(RayClusterFailedError, match=r"the token that the nodes of n1:20001 were"):
        ray_launcher(frontier, address="n1:20001", num_nodes=2)


@pytest.mark.slow
def test_sigkill_of_the_process_that_holds_ray_leaves_nothing() -> None:
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        [sys.executable, "-c", HANGING],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: mark, "PYTHONPATH": str(ROOT)},
    ) as holder:
        assert holder.stdout is not None
        hanging = [int(holder.stdout.readline()) for _ in range(2)]
        names = {process.name() for process in marked(mark)}
        assert {"raylet", "gcs_server"} <= names
        assert all(map(is_alive, hanging))
        holder.kill()
    wait_until_gone(hanging, 2)
    wait_until("no process of the cluster is left", lambda: not marked(mark), 5)

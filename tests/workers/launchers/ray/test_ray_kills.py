"""Whatever process of Ray's an operator or the kernel kills on a node: the node comes back."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from layout_tuner.workers.launchers.ray.launcher import RayNodes
from tests.kit.waiting import wait_until
from tests.workers.process_checks import (
    RANK_PROGRAMS,
    command_line,
    living_children,
    run_group,
    wait_until_gone,
)

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(300)]

RAYS = {
    "gcs_server": "ray/gcs/gcs_server",
    "raylet": "ray/raylet/raylet",
    "dashboard": "ray/dashboard/dashboard.py",
    "dashboard-agent": "ray::DashboardAgent",
    "runtime-env-agent": "ray::RuntimeEnvAgent",
    "ray-start": "ray.scripts.scripts",
    "node-agent": "ray::RayAgent",
}
"""By kind, a text in the command line of its process. Our Ray has no monitor and no log monitor."""
OURS = {
    "bridge": "layout_tuner.workers.launchers.ray.bridge",
    "zygote": "layout_tuner.workers.ranks.zygote",
}
WARDEN = "layout_tuner.workers.ranks.warden"
SHOWS_WITHIN_S = 60.0


def pids_by_kind() -> dict[str, int]:
    """The processes of the launcher; the warden above one is "warden of" it."""
    found: dict[str, int] = {}
    for process in living_children(psutil.Process(), recursive=True):
        words = " ".join(command_line(process))
        kinds = [kind for kind, text in (RAYS | OURS).items() if text in words]
        if kinds:
            found[("warden of " if WARDEN in words else "") + kinds[0]] = process.pid
        else:
            found[words or process.name()] = process.pid
    return found


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    nodes = RayNodes(num_devices=2, rank_entry=RANK_PROGRAMS)
    yield nodes
    pids = [pid for on_node in nodes.pids for pid in on_node.values()]
    nodes.close()
    wait_until_gone(pids)


def kill_and_wait_until_ranks_run_again(nodes: RayNodes, kind: str) -> None:
    os.kill(pids_by_kind()[kind], signal.SIGKILL)
    wait_until("the loss is noticed", nodes.lost, SHOWS_WITHIN_S)
    nodes.recover(0)
    assert run_group(nodes, "succeed").failure is None


def test_every_process_of_a_node_is_killed_by_one_of_these_tests(nodes: RayNodes) -> None:
    assert run_group(nodes, "succeed").failure is None
    wardens = {f"warden of {kind}" for kind in ("bridge", "ray-start", "zygote")}
    assert pids_by_kind().keys() == {*RAYS, *OURS, *wardens}


@pytest.mark.parametrize("kind", RAYS)
def test_a_node_comes_back_after_sigkill_of_any_process_of_ray(nodes: RayNodes, kind: str) -> None:
    kill_and_wait_until_ranks_run_again(nodes, kind)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kind", [*RAYS, *OURS, "warden of bridge", "warden of ray-start", "warden of zygote"]
)
def test_a_node_comes_back_after_three_kills_of_any_process(nodes: RayNodes, kind: str) -> None:
    for _ in range(3):
        kill_and_wait_until_ranks_run_again(nodes, kind)

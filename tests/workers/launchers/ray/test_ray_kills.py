"""Whatever process of Ray's an operator or the kernel kills on a node: the node comes back."""

from __future__ import annotations

import os
import signal

import pytest

from benchmarks.workers.ray_kills import OURS, RAYS, WARDENS, away_after_kill_s, pids_by_kind
from layout_tuner.workers.errors import NodeLostError
from layout_tuner.workers.launchers.ray.launcher import RayNodes
from tests.kit.waiting import wait_until
from tests.workers.process_checks import run_group

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(300)]


def kill(nodes: RayNodes, kind: str) -> None:
    away_after_kill_s(nodes, kind, lambda: run_group(nodes, "succeed").failure is None)


def test_every_process_of_a_node_is_killed_by_one_of_these_tests(nodes: RayNodes) -> None:
    assert run_group(nodes, "succeed").failure is None
    assert pids_by_kind().keys() == {*RAYS, *OURS, *WARDENS}


@pytest.mark.parametrize("kind", RAYS)
def test_a_node_comes_back_after_sigkill_of_any_process_of_ray(nodes: RayNodes, kind: str) -> None:
    kill(nodes, kind)


def test_a_ray_that_hangs_is_replaced_after_one_failed_recovery(
    nodes: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = pids_by_kind()
    os.kill(pids["gcs_server"], signal.SIGSTOP)
    os.kill(pids["node agent"], signal.SIGKILL)
    wait_until("the loss is noticed", nodes.lost)
    with monkeypatch.context() as patch:
        patch.setattr("layout_tuner.workers.launchers.ray.launcher.START_WITHIN_S", 1.0)
        with pytest.raises(NodeLostError, match="has not recovered"):
            nodes.recover(0)
    nodes.recover(0)
    assert run_group(nodes, "succeed").failure is None


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", [*RAYS, *OURS, *WARDENS])
def test_a_node_comes_back_after_three_kills_of_any_process(nodes: RayNodes, kind: str) -> None:
    for _ in range(3):
        kill(nodes, kind)

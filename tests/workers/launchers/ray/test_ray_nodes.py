"""Several Ray nodes: groups over them and beside each other, and what the loss of one leaves."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import psutil
import pytest

from layout_tuner.workers.errors import RayClusterFailedError
from layout_tuner.workers.launchers.group import GroupEnd, GroupFailure
from layout_tuner.workers.launchers.ray.launcher import RayNodes
from layout_tuner.workers.packing.packer import Packer
from layout_tuner.workers.packing.request import PackRequest, Share
from layout_tuner.workers.packing.topology import Topology
from layout_tuner.workers.worker.events import WorkerEvent
from layout_tuner.workers.worker.roster import NodeRoster
from tests.kit.local_ranks import Hanging
from tests.kit.waiting import wait_until
from tests.workers.process_checks import (
    RANK_PROGRAMS,
    command_line,
    is_alive,
    run_group,
    wait_until_gone,
)
from tests.workers.ray_nodes import PATIENCE_S, RayNodeProcess, make_nodes

pytestmark = [pytest.mark.slow, pytest.mark.ranks, pytest.mark.timeout(300)]

LOSS_SHOWS_WITHIN_S = 30.0
"""Ray tells of a dead raylet after fifteen seconds, and we after two; the machine may be busy."""

ON_BOTH = (Share(node=0, devices=(0,)), Share(node=1, devices=(1,)))


@pytest.fixture(scope="module")
def processes() -> Iterator[list[RayNodeProcess]]:
    processes = make_nodes("127.0.1.31", "127.0.1.32")
    for process in processes:
        process.labels = f"domain={'ab'[process.name == 'n1']}"
        process.start()
    yield processes
    for process in processes:
        process.end()


@pytest.fixture(scope="module")
def cluster(processes: list[RayNodeProcess]) -> Iterator[RayNodes]:
    address = processes[0].head
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", processes[0].token)
        nodes = RayNodes(num_devices=2, num_nodes=2, address=address, rank_entry=RANK_PROGRAMS)
        yield nodes
        pids = [pid for on_node in nodes.pids for pid in on_node.values()]
        nodes.close()
        wait_until_gone(pids)


@pytest.fixture
def nodes(cluster: RayNodes) -> RayNodes:
    """The nodes, once none of the two is lost."""
    wait_until("both are there", lambda: not {0, 1} & cluster.lost().keys(), PATIENCE_S)
    return cluster


def position(nodes: RayNodes, name: str) -> int:
    return [node.name for node in nodes.nodes].index(name)


def on(nodes: RayNodes, name: str) -> tuple[Share, ...]:
    return (Share(node=position(nodes, name), devices=(0, 1)),)


@contextmanager
def hanging(nodes: RayNodes, **where: Any) -> Iterator[tuple[Future[GroupEnd], list[int]]]:
    """A group whose ranks hang, and their pids; it is cancelled at the end where it still runs."""
    told = Hanging()
    ended: list[bool] = []
    options = {"deadline_s": 200.0, "on_event": told, "cancelled": lambda: bool(ended), **where}
    with ThreadPoolExecutor(1) as thread:
        group = thread.submit(run_group, nodes, "hang", **options)
        wait_until("the ranks hang", lambda: len(told.pids) == 2 or group.done(), PATIENCE_S)
        assert len(told.pids) == 2, group.result()
        try:
            yield group, told.pids
        finally:
            ended.append(True)


def pair_of(nodes: RayNodes) -> set[str]:
    """The nodes that a probe of two nodes gets, where the nodes have the labels of domains."""
    packer, events = Packer(share_nodes=False), SimpleQueue[WorkerEvent]()
    NodeRoster(nodes, packer, events, topology=Topology(names=("domain",))).look(0.0)
    packer.submit(PackRequest(key=1, num_nodes=2, num_devices=4, at_most_s=10.0))
    ((_, placement),) = packer.place(0.0, None)
    return {nodes.nodes[share.node].name for share in placement}


def failed(group: Future[GroupEnd], within_s: float = LOSS_SHOWS_WITHIN_S) -> GroupFailure:
    return group.result(within_s).failure


def wait_until_both_are_back(nodes: RayNodes, *ranks: int) -> None:
    """They are, and ranks can meet there again, at the address of the first node."""
    wait_until_gone(ranks, PATIENCE_S)
    wait_until("both are back", lambda: not {0, 1} & nodes.lost().keys(), PATIENCE_S)
    end = run_group(nodes, "meet", shares=ON_BOTH, num_nodes=2)
    where = {"address": nodes.nodes[0].address, "port": 4321}
    assert [end.results[rank]["told"] for rank in (0, 1)] == [where, where], end


@pytest.mark.parametrize("victim", ["warden", "zygote", "raylet", "runtime-env agent"])
def test_sigkill_on_one_node_is_its_loss_and_no_others(nodes: RayNodes, victim: str) -> None:
    lost = position(nodes, "n1")
    before = nodes.pids[lost]
    raylet = psutil.Process(before["agent"]).parent()
    (its_agent,) = (p for p in raylet.children() if "ray::RuntimeEnvAgent" in command_line(p)[0])
    victims = {**before, "raylet": raylet.pid, "runtime-env agent": its_agent.pid}
    with (
        hanging(nodes, shares=on(nodes, "n0")) as (unharmed, well),
        hanging(nodes, shares=on(nodes, "n1")) as (group, pids),
    ):
        os.kill(victims[victim], signal.SIGKILL)
        failure = failed(group)
        assert (failure.reason, failure.node) == ("node_lost", lost)
        assert "node n1 was lost: " in failure.message
        wait_until_gone([*pids, *before.values()])
        assert not unharmed.done()
        assert all(map(is_alive, well))
        nodes.recover(lost)
        assert run_group(nodes, "succeed", shares=on(nodes, "n1")).failure is None
        assert all(map(is_alive, well))
    assert nodes.pids[lost] != before


def test_a_node_that_falls_silent_is_lost_and_its_groups_end(nodes: RayNodes) -> None:
    lost = position(nodes, "n1")
    agent = psutil.Process(nodes.pids[lost]["agent"])
    with hanging(nodes, shares=on(nodes, "n1"), deadline_s=5.0) as (group, pids):
        agent.suspend()
        assert failed(group, PATIENCE_S).reason == "timeout"
    wait_until("the silence is noticed", lambda: lost in nodes.lost(), PATIENCE_S)
    assert "hangs, or its network is cut" in nodes.lost()[lost]
    wait_until_gone(pids, PATIENCE_S)
    nodes.recover(lost)
    assert run_group(nodes, "succeed", shares=on(nodes, "n1")).failure is None


def test_a_node_that_dies_comes_back(nodes: RayNodes, processes: list[RayNodeProcess]) -> None:
    lost = position(nodes, "n1")
    with (
        hanging(nodes, shares=on(nodes, "n0")) as (unharmed, well),
        hanging(nodes, shares=on(nodes, "n1")) as (group, _),
    ):
        processes[1].kill_tree()
        failure = failed(group)
        assert (failure.reason, failure.node) == ("node_lost", lost)
        processes[1].wait_until_nothing_is_left()
        assert not unharmed.done()
        processes[1].start()
        wait_until("n1 is back", lambda: not nodes.lost(), PATIENCE_S)
        assert all(map(is_alive, well))
    assert position(nodes, "n1") == lost
    assert len(nodes.nodes) == 2
    assert run_group(nodes, "meet", shares=ON_BOTH, num_nodes=2).failure is None


def test_a_token_that_is_not_the_clusters_is_refused(
    nodes: RayNodes, processes: list[RayNodeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 64)
    with pytest.raises(RayClusterFailedError, match="could not be joined"):
        RayNodes(num_devices=2, address=processes[0].head)
    assert not nodes.lost()


def test_a_node_that_joins_late_is_used(nodes: RayNodes, processes: list[RayNodeProcess]) -> None:
    first = processes[0]
    where = {"address": "127.0.1.33", "head": first.head, "token": first.token}
    late = RayNodeProcess(name="n2", labels="domain=a", **where)
    late.start()
    try:
        wait_until("n2 is there", lambda: len(nodes.nodes) == 3, PATIENCE_S)
        assert position(nodes, "n2") == 2
        assert run_group(nodes, "succeed", shares=on(nodes, "n2")).failure is None
        assert pair_of(nodes) == {"n0", "n2"}, "of one domain by their labels"
    finally:
        late.end()
    wait_until("n2 is lost", lambda: 2 in nodes.lost(), PATIENCE_S)


@pytest.mark.parametrize("victim", ["gcs_server", "raylet"])
def test_the_end_of_the_head_loses_all_nodes_until_they_have_joined_again(
    nodes: RayNodes, processes: list[RayNodeProcess], victim: str
) -> None:
    with hanging(nodes, shares=ON_BOTH, num_nodes=2) as (group, pids):
        os.kill(processes[0].pid_of(victim), signal.SIGKILL)
        assert failed(group).reason == "node_lost"
    wait_until_both_are_back(nodes, *pids)


def test_the_end_of_the_bridge_to_ray_is_no_end_of_the_worker(nodes: RayNodes) -> None:
    (bridge,) = [
        process
        for process in psutil.Process().children(recursive=True)
        if "layout_tuner.workers.launchers.ray.bridge" in command_line(process)
        and "layout_tuner.workers.ranks.warden" not in command_line(process)
    ]
    with hanging(nodes, shares=ON_BOTH, num_nodes=2) as (group, pids):
        bridge.kill()
        assert failed(group).reason == "node_lost"
    wait_until_both_are_back(nodes, *pids)

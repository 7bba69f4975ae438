"""Ranks are placed contiguously, whole nodes at a time, all of them or none."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.workers.errors import PlacementImpossibleError
from layout_tuner.workers.launchers.launcher_nodes import Node
from layout_tuner.workers.launchers.placement import core_share, place
from layout_tuner.workers.packing.request import Placement, Share
from layout_tuner.workers.ranks.rank_task import Device, RankTask


def make_nodes(count: int, *, num_devices: int = 4, num_cores: int = 8) -> list[Node]:
    return [
        Node(
            name=f"node{index}",
            address=f"10.0.0.{index}",
            num_devices=num_devices,
            num_cores=num_cores,
            core_ids=tuple(range(10, 10 + num_cores)),
        )
        for index in range(count)
    ]


def place_probe(
    nodes: list[Node],
    num_ranks: int,
    num_nodes: int,
    *,
    shares: Placement | None = None,
    deadline_s: float = 10.0,
    device: Device = "cpu",
    **options: Any,
) -> dict[int, list[RankTask]]:
    size: dict[str, Any] = {"num_ranks": num_ranks, "num_nodes": num_nodes, "device": device}
    job = {"kind": "probe"}
    return place(nodes, shares, job=job, deadline_s=deadline_s, **size, **options)


def test_node_k_holds_the_ranks_from_k_times_its_devices() -> None:
    placed = place_probe(make_nodes(3), num_ranks=8, num_nodes=2)
    ranks = {node: [task.rank for task in tasks] for node, tasks in placed.items()}
    assert ranks == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}
    assert [task.local_rank for task in placed[1]] == [0, 1, 2, 3]
    assert {task.address for task in placed[1]} == {"10.0.0.1"}
    assert not placed[0][0].oversubscribed


def test_each_device_gets_an_equal_share_of_the_cores_or_those_that_a_site_names() -> None:
    placed = place_probe(make_nodes(1), num_ranks=2, num_nodes=1)
    assert [task.cores for task in placed[0]] == [(10, 11), (12, 13)]
    (poor,) = make_nodes(1, num_devices=8, num_cores=4)
    assert core_share(poor, 7) == ()
    (node,) = make_nodes(1, num_devices=2, num_cores=4)
    near = replace(node, device_cores=((12, 13), (10, 99)))
    assert [core_share(near, device) for device in (0, 1)] == [(12, 13), (10,)]
    (whole,) = make_nodes(1, num_devices=2, num_cores=8)
    halved = replace(whole, num_cores=4)  # a quota leaves cores unused
    assert [core_share(halved, device) for device in (0, 1)] == [(10, 11), (12, 13)]


SHARES = (Share(node=2, devices=(2, 3)), Share(node=1, devices=(0, 1)))


def test_ranks_go_to_the_devices_of_their_shares_and_nowhere_else() -> None:
    placed = place_probe(make_nodes(3), num_ranks=4, num_nodes=2, shares=SHARES)
    devices = {node: [task.device_index for task in tasks] for node, tasks in placed.items()}
    assert devices == {2: [2, 3], 1: [0, 1]}
    assert [task.rank for task in placed[2]] == [0, 1]
    assert [task.local_rank for task in placed[1]] == [0, 1]
    assert placed[2][0].cores == (14, 15)
    assert {task.address for task in placed[2]} == {"10.0.0.2"}


@pytest.mark.parametrize(
    ("nodes", "num_ranks", "num_nodes", "shares", "words"),
    [
        (2, 8, 1, None, "8 ranks on num_nodes=1 are 8 a node"),
        (2, 12, 3, None, "num_nodes=3, and this allocation has 2"),
        (1, 2, 1, Share(node=0, devices=(1,)), r"of which devices \(1,\) were given"),
        (2, 2, 2, Share(node=0, devices=(1,)), "num_nodes=2, and it was given 1"),
    ],
)
def test_too_few_devices_or_too_small_a_share_is_said_with_the_numbers(
    nodes: int, num_ranks: int, num_nodes: int, shares: Share | None, words: str
) -> None:
    given = None if shares is None else (shares,)
    with pytest.raises(PlacementImpossibleError, match=words):
        place_probe(make_nodes(nodes), num_ranks, num_nodes, shares=given)


def test_ranks_may_share_devices_where_that_is_allowed_and_are_marked() -> None:
    placed = place_probe(make_nodes(1), num_ranks=6, num_nodes=1, allow_sharing=True)
    assert all(task.oversubscribed and task.cores == () for task in placed[0])
    assert [task.device_index for task in placed[0]] == [0, 1, 2, 3, 0, 1]
    few_cores = make_nodes(1, num_devices=8, num_cores=2)  # whatever the description says
    assert not place_probe(few_cores, num_ranks=2, num_nodes=1)[0][0].oversubscribed
    placed = place_probe(few_cores, num_ranks=4, num_nodes=1, allow_sharing=True)
    assert all(task.oversubscribed and task.cores == () for task in placed[0])
    with pytest.raises(PlacementImpossibleError, match="has 8 devices and 2 cores"):
        place_probe(few_cores, num_ranks=4, num_nodes=1)
    assert not place_probe(few_cores, 8, 1, device="cuda")[0][0].oversubscribed, "on GPUs"


def test_a_rank_alarm_goes_off_after_the_deadline_and_the_kernel_takes_one_of_ages() -> None:
    assert place_probe(make_nodes(1), 1, 1, deadline_s=10.0)[0][0].deadline_s > 10
    placed = place_probe(make_nodes(1), 1, 1, deadline_s=1e300)
    signal.setitimer(signal.ITIMER_REAL, placed[0][0].deadline_s)
    signal.setitimer(signal.ITIMER_REAL, 0)


def test_processes_of_a_program_see_all_devices_of_their_group_on_the_node() -> None:
    placed = place_probe(make_nodes(3), 4, 2, shares=SHARES, processes="all_devices")
    assert [task.visible_devices for task in placed[2]] == [(2, 3), (2, 3)]
    assert [task.local_rank for task in placed[2]] == [0, 1]
    assert [(task.rank, task.node_rank) for task in placed[1]] == [(2, 1), (3, 1)]
    assert {task.local_world_size for tasks in placed.values() for task in tasks} == {2}
    assert {task.master_address for tasks in placed.values() for task in tasks} == {"10.0.0.2"}


def test_a_program_may_have_one_process_for_each_node() -> None:
    placed = place_probe(make_nodes(3), 4, 2, shares=SHARES, processes="one_per_node")
    (first,), (second,) = placed[2], placed[1]
    sizes = [(task.rank, task.world_size, task.local_world_size) for task in (first, second)]
    assert sizes == [(0, 2, 1), (1, 2, 1)]
    assert (first.visible_devices, second.visible_devices) == ((2, 3), (0, 1))
    assert first.cores == (14, 15, 16, 17), "the cores of both devices"

"""Ranks are placed contiguously, whole nodes at a time, all of them or none."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from workers.errors import PlacementImpossibleError
from workers.launchers.base import Node
from workers.launchers.placement import Processes, core_share, place
from workers.packing.request import Placement, Share
from workers.ranks.rank_task import RankTask


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
    allow_sharing: bool = False,
    deadline_s: float = 10.0,
    shares: Placement | None = None,
    processes: Processes = "own_device",
) -> dict[int, list[RankTask]]:
    return place(
        nodes,
        shares,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        device="cpu",
        job={"kind": "probe"},
        deadline_s=deadline_s,
        allow_sharing=allow_sharing,
        processes=processes,
    )


def test_node_k_holds_the_ranks_from_k_times_its_devices() -> None:
    placed = place_probe(make_nodes(3), num_ranks=8, num_nodes=2)
    assert {node: [task.rank for task in tasks] for node, tasks in placed.items()} == {
        0: [0, 1, 2, 3],
        1: [4, 5, 6, 7],
    }
    assert [task.local_rank for task in placed[1]] == [0, 1, 2, 3]
    assert {task.address for task in placed[1]} == {"10.0.0.1"}
    assert not placed[0][0].oversubscribed


def test_each_device_gets_an_equal_contiguous_share_of_the_cores() -> None:
    placed = place_probe(make_nodes(1), num_ranks=2, num_nodes=1)
    assert [task.cores for task in placed[0]] == [(10, 11), (12, 13)]
    (poor,) = make_nodes(1, num_devices=8, num_cores=4)
    assert core_share(poor, 7) == ()


def test_the_cores_that_a_site_names_for_a_device_go_before_equal_shares() -> None:
    (node,) = make_nodes(1, num_devices=2, num_cores=4)
    near = replace(node, device_cores=((12, 13), (10, 99)))
    assert [core_share(near, device) for device in (0, 1)] == [(12, 13), (10,)]


def test_a_quota_leaves_cores_unused_rather_than_giving_a_device_more_than_its_part() -> None:
    (node,) = make_nodes(1, num_devices=2, num_cores=8)
    halved = replace(node, num_cores=4)
    assert [core_share(halved, device) for device in (0, 1)] == [(10, 11), (12, 13)]


def test_ranks_go_to_the_devices_of_their_shares_and_nowhere_else() -> None:
    shares = (Share(node=2, devices=(2, 3)), Share(node=1, devices=(0, 1)))
    placed = place_probe(make_nodes(3), num_ranks=4, num_nodes=2, shares=shares)
    assert {node: [task.device_index for task in tasks] for node, tasks in placed.items()} == {
        2: [2, 3],
        1: [0, 1],
    }
    assert [task.rank for task in placed[2]] == [0, 1]
    assert [task.local_rank for task in placed[1]] == [0, 1]
    assert placed[2][0].cores == (14, 15)
    assert {task.address for task in placed[2]} == {"10.0.0.2"}


def test_a_share_that_is_too_small_is_said_with_the_numbers() -> None:
    share = Share(node=0, devices=(1,))
    with pytest.raises(PlacementImpossibleError, match=r"of which devices \(1,\) were given"):
        place_probe(make_nodes(1), num_ranks=2, num_nodes=1, shares=(share,))
    with pytest.raises(PlacementImpossibleError, match="num_nodes=2, and it was given 1"):
        place_probe(make_nodes(2), num_ranks=2, num_nodes=2, shares=(share,))


def test_too_few_devices_is_said_with_the_numbers() -> None:
    with pytest.raises(PlacementImpossibleError, match="8 ranks on num_nodes=1 are 8 a node"):
        place_probe(make_nodes(2), num_ranks=8, num_nodes=1)
    with pytest.raises(PlacementImpossibleError, match="num_nodes=3, and this allocation has 2"):
        place_probe(make_nodes(2), num_ranks=12, num_nodes=3)


def test_ranks_may_share_devices_where_that_is_allowed_and_are_marked() -> None:
    placed = place_probe(make_nodes(1), num_ranks=6, num_nodes=1, allow_sharing=True)
    assert all(task.oversubscribed and task.cores == () for task in placed[0])
    assert [task.device_index for task in placed[0]] == [0, 1, 2, 3, 0, 1]


def test_ranks_that_outnumber_the_cores_share_them_whatever_the_description_says() -> None:
    nodes = make_nodes(1, num_devices=8, num_cores=2)
    assert not place_probe(nodes, num_ranks=2, num_nodes=1)[0][0].oversubscribed
    placed = place_probe(nodes, num_ranks=4, num_nodes=1, allow_sharing=True)
    assert all(task.oversubscribed and task.cores == () for task in placed[0])
    with pytest.raises(PlacementImpossibleError, match="has 8 devices and 2 cores"):
        place_probe(nodes, num_ranks=4, num_nodes=1)


def test_ranks_on_gpus_may_outnumber_the_cores() -> None:
    placed = place(
        make_nodes(1, num_devices=8, num_cores=2),
        num_ranks=8,
        num_nodes=1,
        device="cuda",
        job={"kind": "probe"},
        deadline_s=10,
    )
    assert not placed[0][0].oversubscribed


def test_a_rank_alarm_goes_off_after_the_deadline_of_its_group() -> None:
    placed = place_probe(make_nodes(1), num_ranks=1, num_nodes=1)
    assert placed[0][0].deadline_s > 10


def test_a_deadline_of_ages_is_still_an_alarm_that_the_kernel_takes() -> None:
    placed = place_probe(make_nodes(1), num_ranks=1, num_nodes=1, deadline_s=1e300)
    signal.setitimer(signal.ITIMER_REAL, placed[0][0].deadline_s)
    signal.setitimer(signal.ITIMER_REAL, 0)


def test_processes_of_a_program_see_all_devices_of_their_group_on_the_node() -> None:
    shares = (Share(node=2, devices=(2, 3)), Share(node=1, devices=(0, 1)))
    placed = place_probe(
        make_nodes(3), num_ranks=4, num_nodes=2, shares=shares, processes="all_devices"
    )
    assert [task.visible_devices for task in placed[2]] == [(2, 3), (2, 3)]
    assert [task.local_rank for task in placed[2]] == [0, 1]
    assert [(task.rank, task.node_rank) for task in placed[1]] == [(2, 1), (3, 1)]
    assert {task.local_world_size for tasks in placed.values() for task in tasks} == {2}
    assert {task.master_address for tasks in placed.values() for task in tasks} == {"10.0.0.2"}


def test_a_program_may_have_one_process_for_each_node() -> None:
    shares = (Share(node=2, devices=(2, 3)), Share(node=1, devices=(0, 1)))
    placed = place_probe(
        make_nodes(3), num_ranks=4, num_nodes=2, shares=shares, processes="one_per_node"
    )
    (first,), (second,) = placed[2], placed[1]
    assert [(task.rank, task.world_size, task.local_world_size) for task in (first, second)] == [
        (0, 2, 1),
        (1, 2, 1),
    ]
    assert (first.visible_devices, second.visible_devices) == ((2, 3), (0, 1))
    assert first.cores == (14, 15, 16, 17), "the cores of both devices"

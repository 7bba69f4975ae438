"""Placement of ranks on nodes, devices and cores."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from layout_tuner.search_spaces.layouts.rank_mesh import ranks_per_node
from layout_tuner.workers.errors import PlacementImpossibleError
from layout_tuner.workers.launchers.launcher_nodes import Node
from layout_tuner.workers.packing.request import Placement, Share
from layout_tuner.workers.ranks.rank_task import Device, RankTask

Processes = Literal["own_device", "all_devices", "one_per_node"]
"""own_device: each rank sees its own device alone. all_devices: each sees those of the group on its
node, and uses the one of its local rank."""

_LONGEST_ALARM_S: Final = 10 * 365 * 86400.0
"""The kernel's timers have an upper limit of some centuries."""

_RANK_ALARM_GRACE_S: Final = 5.0
"""Seconds after the group's deadline at which a hung rank is ended by its own alarm."""


def place(
    nodes: Sequence[Node],
    shares: Placement | None = None,
    *,
    num_ranks: int,
    num_nodes: int,
    device: Device,
    job: Mapping[str, Any],
    deadline_s: float,
    rendezvous: bool = True,
    allow_sharing: bool = False,
    processes: Processes = "own_device",
) -> dict[int, list[RankTask]]:
    """Places all ranks of a group.

    Ranks are contiguous and fill one node after the other, so that the fastest axis of the mesh,
    tp, stays inside a node.

    Args:
        nodes: of the allocation.
        shares: devices that the group holds; None: the first nodes, as a whole.
        num_ranks: size of the group.
        num_nodes: nodes that it occupies.
        device: kind of the devices.
        job: the document that every rank gets.
        deadline_s: of the group.
        rendezvous: whether the ranks connect to each other.
        allow_sharing: whether ranks may share devices where there are too few.
        processes: which devices each process of the group sees; with "one_per_node" the group has a
            process for each node instead of one for each device.

    Raises:
        PlacementImpossibleError: there are too few nodes or devices.
    """
    shares = _from_the_front(nodes, num_nodes) if shares is None else shares
    if num_nodes != len(shares):
        raise PlacementImpossibleError(
            f"the layout needs num_nodes={num_nodes}, and it was given {len(shares)}"
        )
    per_node = ranks_per_node(num_ranks, num_nodes)
    shared = any(per_node > _capacity(nodes[share.node], share, device) for share in shares)
    if shared and not allow_sharing:
        smallest = min(shares, key=lambda share: _capacity(nodes[share.node], share, device))
        raise PlacementImpossibleError(
            f"{num_ranks} ranks on num_nodes={num_nodes} are {per_node} a node, and "
            f"{_described(nodes[smallest.node], smallest)}"
        )
    group = secrets.token_hex(6)
    placed: dict[int, list[RankTask]] = {}
    for rank in range(num_ranks):
        index, local_rank = divmod(rank, per_node)
        share = shares[index]
        node = nodes[share.node]
        device_index = share.devices[local_rank % len(share.devices)]
        task = RankTask(
            group=group,
            rank=rank,
            world_size=num_ranks,
            local_rank=local_rank,
            local_world_size=min(per_node, num_ranks - index * per_node),
            node_rank=index,
            device=device,
            device_index=device_index,
            visible_devices=(device_index,),
            cores=() if shared else core_share(node, device_index),
            address=node.address,
            master_address=nodes[shares[0].node].address,
            rendezvous=rendezvous,
            oversubscribed=shared,
            deadline_s=min(deadline_s + _RANK_ALARM_GRACE_S, _LONGEST_ALARM_S),
            job=job,
        )
        placed.setdefault(share.node, []).append(task)
    if processes == "own_device":
        return placed
    return {node: _together(tasks, processes, num_nodes) for node, tasks in placed.items()}


def _together(tasks: Sequence[RankTask], processes: Processes, num_nodes: int) -> list[RankTask]:
    """The tasks of a node with all of the group's devices there visible to each, as torchrun's are.

    With one process for each node, the first task stands for all.
    """
    devices = tuple(dict.fromkeys(task.device_index for task in tasks))
    if processes == "all_devices":
        return [replace(task, visible_devices=devices) for task in tasks]
    first = tasks[0]
    return [
        replace(
            first,
            rank=first.node_rank,
            world_size=num_nodes,
            local_world_size=1,
            visible_devices=devices,
            cores=tuple(sorted({core for task in tasks for core in task.cores})),
        )
    ]


def core_share(node: Node, device_index: int) -> tuple[int, ...]:
    """CPU numbers of a device: those that the site lists, or an equal contiguous share.

    Empty, which means all cores, where there are fewer cores than devices, or where this process
    may use none of the listed cores.
    """
    if node.device_cores:
        ours = set(node.core_ids)
        return tuple(core for core in node.device_cores[device_index] if core in ours)
    share = node.num_cores // node.num_devices
    return node.core_ids[device_index * share : (device_index + 1) * share]


def _from_the_front(nodes: Sequence[Node], num_nodes: int) -> Placement:
    if num_nodes > len(nodes):
        raise PlacementImpossibleError(
            f"the layout needs num_nodes={num_nodes}, and this allocation has {len(nodes)}"
        )
    return tuple(Share.of_first(index, nodes[index].num_devices) for index in range(num_nodes))


def _capacity(node: Node, share: Share, device: Device) -> int:
    """Ranks that a share holds, each with a device of its own."""
    return min(len(share.devices), node.capacity(device))


def _described(node: Node, share: Share) -> str:
    whole = f"a node of this allocation has {node.num_devices} devices and {node.num_cores} cores"
    if len(share.devices) == node.num_devices:
        return whole
    return f"{whole}, of which devices {share.devices} were given"

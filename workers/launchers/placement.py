"""Which rank goes to which node, device and cores."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from workers.errors import PlacementImpossibleError
from workers.launchers.base import Node
from workers.rank_task import Device, RankTask

_LONGEST_ALARM_S: Final = 10 * 365 * 86400.0
"""The kernel's timers take no more than some centuries, and nobody waits for this one either."""

_RANK_ALARM_GRACE_S: Final = 5.0
"""A rank's own alarm goes off this long after the group's deadline, which should have ended it."""


def place(
    nodes: Sequence[Node],
    *,
    num_ranks: int,
    num_nodes: int,
    device: Device,
    job: Mapping[str, Any],
    deadline_s: float,
    rendezvous: bool = True,
    allow_sharing: bool = False,
) -> dict[int, list[RankTask]]:
    """Places a group of ranks, all or nothing.

    Ranks are contiguous and fill one node after the other, so that the fastest axis of the mesh,
    tp, stays inside a node.

    Args:
        nodes: where to; those at the front are taken.
        num_ranks: size of the group.
        num_nodes: nodes that it shall occupy.
        device: what ranks compute on.
        job: the document that every rank gets.
        deadline_s: of the group.
        rendezvous: whether the ranks meet.
        allow_sharing: whether ranks may share devices when there are too few.

    Raises:
        PlacementImpossibleError: there are too few nodes or devices.
    """
    if num_nodes > len(nodes):
        raise PlacementImpossibleError(
            f"the layout needs num_nodes={num_nodes}, and this allocation has {len(nodes)}"
        )
    per_node = -(-num_ranks // num_nodes)
    smallest = min(nodes[:num_nodes], key=lambda node: node.capacity(device))
    shared = per_node > smallest.capacity(device)
    if shared and not allow_sharing:
        raise PlacementImpossibleError(
            f"{num_ranks} ranks on num_nodes={num_nodes} are {per_node} a node, and a node of this "
            f"allocation has {smallest.num_devices} devices and {smallest.num_cores} cores"
        )
    group = secrets.token_hex(6)
    placed: dict[int, list[RankTask]] = {}
    for rank in range(num_ranks):
        index, local_rank = divmod(rank, per_node)
        node = nodes[index]
        task = RankTask(
            group=group,
            rank=rank,
            world_size=num_ranks,
            local_rank=local_rank,
            device=device,
            device_index=local_rank % node.num_devices,
            cores=() if shared else core_share(local_rank, node.num_devices, node.num_cores),
            address=node.address,
            rendezvous=rendezvous,
            oversubscribed=shared,
            deadline_s=min(deadline_s + _RANK_ALARM_GRACE_S, _LONGEST_ALARM_S),
            job=job,
        )
        placed.setdefault(index, []).append(task)
    return placed


def core_share(device_index: int, num_devices: int, num_cores: int) -> tuple[int, ...]:
    """Positions of the cores that belong to a device: equal contiguous shares.

    Empty, so all cores, where there are fewer cores than devices.
    """
    share = num_cores // num_devices
    return tuple(range(device_index * share, (device_index + 1) * share))

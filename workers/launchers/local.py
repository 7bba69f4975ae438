"""The local launcher: this machine's zygote, without Ray."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Final

from search_spaces.cluster import Cluster
from search_spaces.machine import usable_cores
from workers.errors import NodeLostError
from workers.json_lines import Document
from workers.launchers.base import Node, NodeEvent
from workers.launchers.group_launcher import GroupLauncher
from workers.node_ranks import NodeRanks
from workers.rank_task import RankTask

_LOOPBACK: Final = "127.0.0.1"


class LocalNodes:
    """This machine as a set of one node.

    Args:
        num_devices: devices that it is described with.
        rank_entry: "module:function" that a rank runs.
    """

    def __init__(self, *, num_devices: int, rank_entry: str = "workers.rank:main") -> None:
        node = Node(
            name=socket.gethostname(),
            address=_LOOPBACK,
            num_devices=num_devices,
            num_cores=usable_cores(),
        )
        self._nodes = (node,)
        self._rank_entry = rank_entry
        self.ranks = NodeRanks(rank_entry=rank_entry)

    @property
    def nodes(self) -> Sequence[Node]:
        """The one node."""
        return self._nodes

    def wait_until_ready(self) -> None:
        """Waits for the zygote where it has just been started."""
        self.ranks.wait_until_ready()

    def start(self, tasks: Mapping[int, Sequence[RankTask]]) -> None:
        """Forks ranks."""
        self.ranks.start(tasks[0])

    def tell(self, _nodes: Sequence[int], group: str, document: Document) -> None:
        """Sends a document to every rank of a group."""
        self.ranks.tell(group, document)

    def poll(self, _nodes: Sequence[int], timeout_s: float) -> list[NodeEvent]:
        """What happened since the last call."""
        return [NodeEvent(node=0, document=event) for event in self.ranks.poll(timeout_s)]

    def end(self, _nodes: Sequence[int], group: str) -> dict[int, str]:
        """Ends what is left of a group."""
        try:
            return self.ranks.end(group)
        except NodeLostError:
            self.ranks.close()  # returns when the warden has ended the ranks
            return {}

    def recover(self) -> None:
        """Starts another zygote."""
        self.ranks.close()
        self.ranks = NodeRanks(rank_entry=self._rank_entry)

    def close(self) -> None:
        """Ends the zygote and everything below it."""
        self.ranks.close()


def local_launcher(cluster: Cluster) -> GroupLauncher:
    """Starts the zygote of this machine; more ranks than devices are allowed."""
    nodes = LocalNodes(num_devices=cluster.devices_per_node)
    return GroupLauncher(nodes, cluster, allow_sharing=True)

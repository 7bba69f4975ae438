"""The local launcher: the zygote of this machine, without Ray."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from layout_tuner.process_resources import usable_cores
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.trainers.program import ProgramTrainer
from layout_tuner.workers.errors import NodeLostError
from layout_tuner.workers.launchers.event_router import EventRouter
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.launchers.launcher_nodes import Node, NodeEvent
from layout_tuner.workers.ranks.json_lines import Document
from layout_tuner.workers.ranks.rank_task import RANK_ENTRY, RankTask
from layout_tuner.workers.ranks.zygote_client import ZygoteClient

_LOOPBACK: Final = "127.0.0.1"
_POLL_S: Final = 60.0


class LocalNodes:
    """This machine as a set of one node."""

    def __init__(self, *, num_devices: int, rank_entry: str = RANK_ENTRY) -> None:
        self.nodes = (
            Node(
                name=socket.gethostname(),
                address=_LOOPBACK,
                num_devices=num_devices,
                num_cores=usable_cores(),
                core_ids=tuple(sorted(os.sched_getaffinity(0))),
            ),
        )
        self._rank_entry = rank_entry
        self._router = EventRouter()
        self._start_zygote()

    def wait_until_ready(self) -> None:
        """Waits for the zygote where it has just been started."""
        self.ranks.wait_until_ready()

    def start(self, tasks: Mapping[int, Sequence[RankTask]]) -> None:
        self._router.open(tasks[0][0].group, [0])
        self.ranks.start(tasks[0])

    def tell(self, _nodes: Sequence[int], group: str, document: Document) -> None:
        self.ranks.tell(group, document)

    def poll(self, _nodes: Sequence[int], group: str, timeout_s: float) -> list[NodeEvent]:
        return self._router.poll(group, timeout_s)

    def end(self, _nodes: Sequence[int], group: str) -> dict[int, str]:
        try:
            return self.ranks.end(group)
        except NodeLostError as error:
            self._router.lose(0, str(error))
            self.ranks.close()  # returns when the warden has ended the ranks
            return {}
        finally:
            self._router.close(group)

    def lost(self) -> Mapping[int, str]:
        return self._router.lost()

    def agent_ends(self, _node: int) -> int:
        return 0  # its agent is this process

    def recover(self, _node: int) -> None:
        """Starts another zygote."""
        self.close()
        self._router.find(0)
        self._start_zygote()

    def close(self) -> None:
        self.ranks.close()
        self._reader.join()

    def _start_zygote(self) -> None:
        self.ranks = ZygoteClient(rank_entry=self._rank_entry)
        self._reader = threading.Thread(
            target=self._read, args=[self.ranks], name="node-reader", daemon=True
        )
        self._reader.start()

    def _read(self, ranks: ZygoteClient) -> None:
        while True:
            events = ranks.poll(_POLL_S)
            lost = events.pop() if events and events[-1]["event"] == "lost" else None
            self._router.deliver(0, events)
            if lost is not None:
                return self._router.lose(0, lost["message"])


def local_launcher(
    cluster: Cluster, trainers: Mapping[str, ProgramTrainer] = MappingProxyType({})
) -> GroupLauncher:
    """Starts the zygote of this machine; more ranks than devices are allowed."""
    nodes = LocalNodes(num_devices=cluster.devices_per_node)
    return GroupLauncher(nodes, cluster, allow_sharing=True, trainers=trainers)

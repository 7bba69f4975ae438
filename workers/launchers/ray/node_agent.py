"""The node agent: the Ray actor of one node, around its `NodeRanks`."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from search_spaces.machine import available_memory_bytes, usable_cores
from workers.ranks.json_lines import Document
from workers.ranks.node_ranks import NodeRanks
from workers.ranks.processes import die_with_parent
from workers.ranks.rank_task import RankTask


class NodeAgent:
    """Starts and ends the ranks of its node, by calls over Ray.

    Its methods take and return plain JSON values. Several run at the same time, each in a thread of
    its own: a poll waits while groups are ended.

    Args:
        rank_entry: "module:function" that a rank runs.
    """

    def __init__(self, rank_entry: str) -> None:
        raylet_pid = os.getppid()
        # Without this, an actor outlives a killed raylet by half a minute and more.
        die_with_parent(raylet_pid)
        self._ranks = NodeRanks(other_guardians=[raylet_pid], rank_entry=rank_entry)

    def describe(self) -> Document:
        """The node's name, cores, free memory and processes, once its zygote is ready."""
        self._ranks.wait_until_ready()
        return {
            "name": socket.gethostname(),
            "num_cores": usable_cores(),
            "core_ids": sorted(os.sched_getaffinity(0)),
            "memory_available_bytes": available_memory_bytes(),
            "pids": {"agent": os.getpid(), **self._ranks.pids},
        }

    def start(self, tasks: Sequence[Mapping[str, Any]]) -> None:
        """Forks ranks."""
        self._ranks.start([RankTask.from_mapping(task) for task in tasks])

    def tell(self, group: str, document: Document) -> None:
        """Sends a document to every rank of a group."""
        self._ranks.tell(group, document)

    def poll(self, timeout_s: float) -> list[Document]:
        """The events since the last call."""
        return self._ranks.poll(timeout_s)

    def end(self, group: str) -> dict[int, str]:
        """Ends the remaining processes of a group; returns the log tails by rank."""
        return self._ranks.end(group)

    def close(self) -> None:
        """Ends the zygote and all processes below it."""
        self._ranks.close()

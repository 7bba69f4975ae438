"""The interface of the nodes of a launcher, and how their events reach the groups there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from workers.errors import NodeLostError
from workers.ranks.json_lines import Document
from workers.ranks.rank_task import Device, RankTask

OnEvent = Callable[[Document], None]
"""Called with each report of a running rank, in the order of arrival."""

Cancelled = Callable[[], bool]
"""Returns whether the run must end now."""

CAUSE_WITHIN_S: Final = 10.0
"""How long a failure that may be the consequence of another one waits for its cause, unless all
ranks end before: trainers on several nodes take seconds to print an error and to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node that ranks can be placed on."""

    name: str
    """Host name, for messages."""
    address: str
    """Address at which the other nodes reach it."""
    num_devices: int
    """Devices by its description."""
    num_cores: int
    """Cores that this process may use at once: fewer than `core_ids` where a container has a
    quota."""
    core_ids: tuple[int, ...]
    """CPU numbers that this process may use."""
    device_cores: tuple[tuple[int, ...], ...] = ()
    """CPU numbers by device, where the site lists the near ones; empty: equal contiguous shares."""

    def capacity(self, device: Device) -> int:
        """Ranks that it holds without sharing devices; a CPU device needs a core."""
        return min(self.num_devices, self.num_cores) if device == "cpu" else self.num_devices


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEvent:
    """An event on a node: a report, an exit, or the loss of the node."""

    node: int
    """Position in `NodeSet.nodes`."""
    document: Document


@dataclass(kw_only=True, slots=True)
class _Queue:
    """The events that a group has not polled yet."""

    nodes: Sequence[int]
    changed: threading.Condition
    events: list[NodeEvent] = field(default_factory=list)

    def put(self, node: int, document: Document) -> None:
        self.events.append(NodeEvent(node=node, document=document))
        self.changed.notify()


class EventRouter:
    """One queue a group; the reader of the nodes fills it, and the group's thread empties it.

    The cost of a report does not depend on the number of nodes and groups. It wakes one thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queues: dict[str, _Queue] = {}
        self._lost: dict[int, str] = {}

    def open(self, group: str, nodes: Sequence[int]) -> None:
        """Opens the queue of a group; to be called before the group starts.

        Raises:
            NodeLostError: one of its nodes is lost.
        """
        with self._lock:
            for node in nodes:
                if node in self._lost:
                    raise NodeLostError(self._lost[node], node=node)
            self._queues[group] = _Queue(nodes=nodes, changed=threading.Condition(self._lock))

    def close(self, group: str) -> None:
        """Removes the queue of a group; later events of it are dropped."""
        with self._lock:
            self._queues.pop(group, None)

    def deliver(self, node: int, documents: Iterable[Document]) -> None:
        """Puts events of a node into the queues of their groups."""
        with self._lock:
            for document in documents:
                queue = self._queues.get(document["group"])
                if queue is not None:
                    queue.put(node, document)

    def lose(self, node: int, why: str) -> None:
        """Puts the loss of a node into the queues of its groups; the first reason is kept."""
        with self._lock:
            if node in self._lost:
                return
            self._lost[node] = why
            for queue in self._queues.values():
                if node in queue.nodes:
                    queue.put(node, {"event": "lost", "message": why})

    def find(self, node: int) -> None:
        """Notes that a lost node can be used again."""
        with self._lock:
            self._lost.pop(node, None)

    def lost(self) -> dict[int, str]:
        """The nodes that are lost now, and why."""
        with self._lock:
            return dict(self._lost)

    def is_lost(self, node: int) -> bool:
        return node in self._lost

    def poll(self, group: str, timeout_s: float) -> list[NodeEvent]:
        """The events of a group since the last call; waits for one up to the timeout."""
        with self._lock:
            queue = self._queues[group]
            queue.changed.wait_for(lambda: queue.events, timeout_s)
            events, queue.events = queue.events, []
            return events


class LaunchedNodes(Protocol):
    """The nodes of a launcher, identified by their position. Any thread may call it."""

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes, in order. There may be more later, at the end; none is ever taken out."""

    def lost(self) -> Mapping[int, str]:
        """Nodes that can't be used now, and why."""

    def recover(self, node: int, /) -> None:
        """Replaces the agent and the zygote of a lost node; the other nodes go on.

        Raises:
            WorkerError: that is not possible at the moment.
            RanksLeftError: it is not possible at all.
        """

    def close(self) -> None:
        """Ends every process on every node."""


class NodeSet(LaunchedNodes, Protocol):
    """Nodes with a zygote each."""

    def wait_until_ready(self) -> None:
        """Waits until ranks can be forked at once; NodeLostError if a node does not get ready."""

    def start(self, tasks: Mapping[int, Sequence[RankTask]]) -> None:
        """Forks the ranks of one group on some nodes.

        Where that takes long, it happens after this has returned, between the events "starting" and
        "started" of the group; the deadline of the group counts from "started".

        Raises:
            NodeLostError: it failed on one of them; the others may have started.
        """

    def tell(self, nodes: Sequence[int], group: str, document: Document, /) -> None:
        """Sends a document to every rank of a group; NodeLostError if one of the nodes is lost."""

    def poll(self, nodes: Sequence[int], group: str, timeout_s: float, /) -> list[NodeEvent]:
        """The events of a group and of its nodes since the last call.

        Waits for an event up to the timeout. Each group gets the loss of a node once.
        """

    def end(self, nodes: Sequence[int], group: str, /) -> dict[int, str]:
        """Ends the remaining processes of a group; returns the log tails by rank.

        The tails of ranks on lost nodes are missing.

        Other groups on these nodes go on.

        Raises:
            RanksLeftError: a process can't be ended.
        """

"""Distributes events of nodes to the groups that run there, with one queue for each group."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from layout_tuner.workers.errors import NodeLostError
from layout_tuner.workers.launchers.launcher_nodes import NodeEvent
from layout_tuner.workers.ranks.json_lines import Document


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
        """Opens a group's queue before it starts; NodeLostError if one of its nodes is lost."""
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

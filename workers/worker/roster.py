"""The nodes of the allocation and their states: checks, losses, recoveries, quarantine."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from layout_tuner.protocol.connection.backoff import Backoff
from layout_tuner.protocol.states import NodeState
from layout_tuner.protocol.worker_messages import SetAside
from layout_tuner.workers.errors import RanksLeftError
from layout_tuner.workers.launchers.launcher_nodes import Cancelled, LaunchedNodes
from layout_tuner.workers.packing.packer import Packer
from layout_tuner.workers.packing.topology import Topology
from layout_tuner.workers.worker.events import (
    Events,
    NodeRecovered,
    NodesChecked,
    WorkerEvent,
    in_background,
)
from layout_tuner.workers.worker.node_health import HealthReport, problems

_LOG = logging.getLogger(__name__)

_READS_AS: Final = {"checking": "being checked", "recovering": "being recovered"}
"""States that have other words in a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RosterNode:
    """The state of a node."""

    name: str
    num_devices: int
    state: NodeState = "starting"
    """`idle` means idle or busy: the trials know which."""
    reason: str = ""
    report: HealthReport | None = None
    """The result of its last check."""
    next_try_at: float = 0.0


Check = Callable[[Sequence[int], Cancelled, Mapping[int, HealthReport]], Mapping[int, HealthReport]]
"""Checks the health of some idle nodes, in comparison with reports of other nodes. Nodes that look
suspicious have been measured twice when it returns."""


@dataclass
class NodeRoster:
    """Which nodes can be used. Only the thread that owns the worker's state uses it.

    A node is checked before its first probe, after it was lost, and when it is released from
    quarantine. A lost node is recovered in the background; failed attempts are repeated. A node is
    quarantined where its check fails, where processes on it can't be ended, where probes fail that
    complete on other nodes, or where a user asks for it. A user releases it.
    """

    launcher: LaunchedNodes
    """Has the nodes."""
    packer: Packer
    """Gets each node, and whether it can be used."""
    events: Events
    """Where the ends of checks and recoveries are put."""
    check: Check | None = None
    """Checks nodes; None: they are not checked."""
    topology: Topology = field(default_factory=Topology)
    """The groups of nodes that are known before the nodes join."""
    cpu: bool = False
    """Whether devices are cores, of which a node may have fewer than its description."""

    def __post_init__(self) -> None:
        self._nodes: list[RosterNode] = []
        self._backoffs = defaultdict[int, Backoff](lambda: Backoff(1.0, 60.0))
        """By node, the pauses between attempts to recover it."""
        self._measured: set[int] = set()
        """Nodes whose check is under way, also lost ones: a second check would disturb the
        first."""
        self._closing = threading.Event()
        self._said = ""
        """The last warning about groups of nodes."""

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def is_starting(self) -> bool:
        """Whether no node has passed its check yet."""
        return all(node.state in ("starting", "checking") for node in self._nodes)

    @property
    def is_in_motion(self) -> bool:
        """Whether a node is being checked or recovered just now."""
        return bool(self._measured) or any(node.state == "recovering" for node in self._nodes)

    def usable(self) -> list[int]:
        """Positions of the nodes that can be used."""
        return [index for index, node in enumerate(self._nodes) if node.state == "idle"]

    def sizes(self, positions: Iterable[int] | None = None) -> list[int]:
        """Devices of some nodes, or of all."""
        chosen = range(len(self._nodes)) if positions is None else positions
        return [self._nodes[index].num_devices for index in chosen]

    def position(self, name: str) -> int | None:
        """Of the node with a name; None: there is none."""
        return next((index for index, node in enumerate(self._nodes) if node.name == name), None)

    def name(self, index: int) -> str:
        """Of the node at a position."""
        return self._nodes[index].name

    def look(self, now: float) -> None:
        """Notes nodes that have joined or were lost, and begins the recoveries that are due."""
        joined = list(self.launcher.nodes)[len(self._nodes) :]
        for node in joined:
            num_devices = node.capacity("cpu") if self.cpu else node.num_devices
            # The service needs unique names; in tests two nodes have the same host.
            name = node.name if self.position(node.name) is None else f"{node.name}#{len(self)}"
            self.packer.add_node(num_devices, name=name)
            self._nodes.append(RosterNode(name=name, num_devices=num_devices))
        if joined:
            self._find_groups()
        self._notice_losses()
        if self._closing.is_set():
            return  # a check that begins now could outlive the launcher
        self._check([i for i, node in enumerate(self._nodes) if node.state == "starting"])
        for index, known in enumerate(self._nodes):
            if known.state == "lost" and now >= known.next_try_at:
                self._recover(index)

    def take_checked(self, event: NodesChecked) -> None:
        """Notes the end of a health check."""
        self._notice_losses()
        self._measured.difference_update(event.nodes)
        if self._closing.is_set():
            return
        # Nodes that were lost or quarantined meanwhile are checked again later.
        checked = [index for index in event.nodes if self._nodes[index].state == "checking"]
        for index in checked:
            self._change(index, report=event.reports.get(index))
        found = problems(self._reports())
        for index in checked:
            node = self._nodes[index]
            why = found.get(index, "") if node.report else f"it could not be checked: {event.error}"
            if why:
                self.quarantine(index, why)
            else:
                self._set(index, "idle", "")

    def take_recovered(self, event: NodeRecovered, now: float) -> None:
        node = self._nodes[event.node]
        if node.state != "recovering":
            return None
        if event.ranks_are_left:
            return self.quarantine(event.node, event.error)
        if event.error:
            self._change(event.node, next_try_at=now + self._backoffs[event.node].take())
            self._set(event.node, "lost", event.error)
            return _LOG.warning("node %s has not recovered yet: %s", node.name, event.error)
        self._backoffs[event.node].reset()
        self._find_groups()  # it may have come back elsewhere
        _LOG.info("node %s has recovered", node.name)
        return self._check([event.node])

    def quarantine(self, index: int, why: str) -> None:
        """Takes a node out of use; probes that run on it go on."""
        node = self._nodes[index]
        if node.state != "quarantined":
            _LOG.error("node %s is quarantined: %s", node.name, why)
        self._set(index, "quarantined", why)

    def release(self, name: str) -> bool:
        """Takes a node out of quarantine; returns whether it was quarantined."""
        index = self.position(name)
        if index is None or self._nodes[index].state != "quarantined":
            return False
        _LOG.info("node %s is released from quarantine", name)
        self._check([index])
        return True

    def take_wishes(self, wishes: Sequence[SetAside]) -> None:
        """Quarantines nodes on request of the service."""
        for wish in wishes:
            index = self.position(wish.node)
            if index is not None and self._nodes[index].state != "quarantined":
                self.quarantine(index, wish.reason)

    def records(self) -> tuple[RosterNode, ...]:
        """The states of all nodes, by position."""
        return tuple(self._nodes)

    def close(self) -> None:
        """Cancels the checks that are under way."""
        self._closing.set()

    def _reports(self) -> dict[int, HealthReport]:
        return {i: node.report for i, node in enumerate(self._nodes) if node.report is not None}

    def _find_groups(self) -> None:
        """Sets the groups of all nodes in the packer; a topology that contradicts them has none."""
        nodes = self.launcher.nodes[: len(self._nodes)]
        groups = [self.topology.groups(n.name, n.labels, n.switches) for n in nodes]
        names = self.topology.names if any(groups) else ()
        lacking = ", ".join(n.name for n, known in zip(nodes, groups, strict=True) if not known)
        why = ""
        if names and lacking:
            why = f"no {names[0]} is known of these nodes, so each counts as one: {lacking}"[:500]
        if contradiction := self.topology.contradiction(groups):
            names, why = (), f"probes are placed as without a topology: {contradiction}"
        if why not in ("", self._said):
            _LOG.warning("%s", why)
        self._said = why
        placed = [
            known or (node.name,) * len(names) for node, known in zip(nodes, groups, strict=True)
        ]
        self.packer.set_levels(names, placed)

    def _notice_losses(self) -> None:
        for index, why in self.launcher.lost().items():
            # A lost node that has just joined is noted the next time.
            node = self._nodes[index] if index < len(self._nodes) else None
            if node is not None and node.state not in ("lost", "recovering", "quarantined"):
                _LOG.error("node %s is lost: %s", node.name, why)
                self._set(index, "lost", why)

    def _set(self, index: int, state: NodeState, reason: str) -> None:
        self._change(index, state=state, reason=reason)
        why = f"{_READS_AS.get(state, state)} ({reason})" if reason else _READS_AS.get(state, state)
        self.packer.set_usable(index, state == "idle", why)

    def _change(self, index: int, **changes: Any) -> None:
        self._nodes[index] = replace(self._nodes[index], **changes)

    def _check(self, indices: list[int]) -> None:
        check, known = self.check, self._reports()
        for index in indices:
            # A probe that still runs would disturb the check: `look` tries again soon.
            used = index in self._measured or bool(self.packer.holders(index))
            state: NodeState = "idle" if check is None else "starting" if used else "checking"
            self._set(index, state, "")
        nodes = tuple(index for index in indices if self._nodes[index].state == "checking")
        if check is None or not nodes or self._closing.is_set():
            return
        self._measured.update(nodes)
        cancelled = self._closing.is_set
        others = {index: known[index] for index in known if index not in nodes}

        def measure() -> WorkerEvent:
            return NodesChecked(nodes=nodes, reports=check(nodes, cancelled, others))

        def failed(error: Exception) -> WorkerEvent:
            return NodesChecked(nodes=nodes, reports={}, error=str(error))

        in_background(self.events, measure, name="health-check", failed=failed)

    def _recover(self, index: int) -> None:
        self._set(index, "recovering", self._nodes[index].reason)

        def recover() -> WorkerEvent:
            self.launcher.recover(index)
            return NodeRecovered(node=index)

        def failed(error: Exception) -> WorkerEvent:
            are_left = isinstance(error, RanksLeftError)
            return NodeRecovered(node=index, error=str(error), ranks_are_left=are_left)

        in_background(self.events, recover, name=f"recover-{index}", failed=failed)

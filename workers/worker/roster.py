"""The nodes of the allocation and their states: checks, losses, recoveries, quarantine.

One failure may be the fault of the layout or of a node. So the probe is run again on other nodes
(the second opinion). If it completes there, each node of the first run gets a strike.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from search_spaces.protocol.outcome import FailureReason, Outcome
from search_spaces.protocol.states import NodeState
from search_spaces.protocol.worker_messages import SetAside
from workers.backoff import Backoff
from workers.errors import RanksLeftError
from workers.launchers.base import Cancelled, LaunchedNodes
from workers.packing.packer import Packer
from workers.worker.events import Events, NodeRecovered, NodesChecked, WorkerEvent, in_background
from workers.worker.held_trial import HeldTrial
from workers.worker.node_health import HealthReport, problems

_LOG = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 60.0

_READS_AS: Final = {"checking": "being checked", "recovering": "being recovered"}
"""States that have other words in a sentence."""

STRIKES_OUT: Final = 2
"""Strikes that quarantine a node."""

DOUBTFUL: Final[frozenset[FailureReason]] = frozenset({"crashed", "timeout", "node_lost"})
"""Reasons of failures that may be the node's fault as well as the layout's."""


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
    switches: Mapping[str, str] = field(default_factory=dict)
    """The switch above each node that the site names."""
    cpu: bool = False
    """Whether devices are cores, of which a node may have fewer than its description."""

    def __post_init__(self) -> None:
        self._nodes: list[RosterNode] = []
        self._backoffs = defaultdict[int, Backoff](
            lambda: Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        )
        """By node, the pauses between attempts to recover it."""
        self._measured: set[int] = set()
        """Nodes whose check is under way, also lost ones: a second check would disturb the
        first."""
        self._closing = threading.Event()

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
            self.packer.add_node(num_devices, name=name, switch=self.switches.get(node.name, ""))
            self._nodes.append(RosterNode(name=name, num_devices=num_devices))
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """A probe that failed on a node and completed on others."""

    probe: Hashable
    """The trial's id."""
    why: str
    """How it failed, as text."""
    is_alone: bool
    """Whether the node was the only suspect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Doubt:
    """A failed probe that is run again on other nodes."""

    suspects: frozenset[str]
    why: str


@dataclass(kw_only=True)
class NodeHistory:
    """The strikes of a worker's nodes, by name.

    A node that was one of several suspects loses its strike once it completes a probe. A node that
    was the only suspect keeps it: a node that fails sometimes also completes probes sometimes.
    """

    _doubts: dict[Hashable, _Doubt] = field(default_factory=dict)
    _strikes: dict[str, list[Strike]] = field(default_factory=dict)

    def strikes(self, node: str) -> Sequence[Strike]:
        return tuple(self._strikes.get(node, ()))

    def failed(self, probe: Hashable, nodes: Sequence[str], outcome: Outcome) -> frozenset[str]:
        """Notes a failure; returns the suspects among its nodes: the one that it names, or all.

        The probe is to be run again on other nodes; not so where there are no suspects.
        """
        if self._doubts.pop(probe, None) is not None:
            return frozenset()  # it failed on other nodes too: the layout is to blame
        if outcome.reason not in DOUBTFUL:
            return frozenset()
        suspects = frozenset({outcome.node} if outcome.node in nodes else set(nodes))
        why = f"{outcome.reason}: {outcome.message}"
        self._doubts[probe] = _Doubt(suspects=suspects, why=why)
        return suspects

    def completed(self, probe: Hashable, nodes: Sequence[str]) -> dict[str, str]:
        """Notes a completed probe; returns the nodes to quarantine because of it, and why."""
        for node in nodes:
            self._strikes[node] = [strike for strike in self.strikes(node) if strike.is_alone]
        doubt = self._doubts.pop(probe, None)
        if doubt is None:
            return {}
        suspects = sorted(doubt.suspects - set(nodes))
        alone = len(suspects) == 1
        for node in suspects:
            strike = Strike(probe=probe, why=doubt.why, is_alone=alone)
            self._strikes.setdefault(node, []).append(strike)
        return {node: why for node in suspects if (why := self._strike_out(node)) is not None}

    def forget(self, probe: Hashable) -> None:
        """Drops a suspicion: the second run was cancelled, or there are no other nodes."""
        self._doubts.pop(probe, None)

    def release(self, node: str) -> None:
        """Removes the strikes of a node that is taken out of quarantine."""
        self._strikes.pop(node, None)

    def _strike_out(self, node: str) -> str | None:
        strikes = self._strikes[node]
        if len(strikes) != STRIKES_OUT:  # with more, it is in quarantine
            return None
        last = strikes[-1]
        trials = ", ".join(str(strike.probe) for strike in strikes)
        return f"failed trials {trials} that other nodes completed; last {last.why}"


@dataclass(kw_only=True)
class SecondOpinions(NodeHistory):
    """Decides which failed probes are run again on other nodes, and quarantines nodes."""

    roster: NodeRoster

    def suspects_after(self, trial: HeldTrial, outcome: Outcome) -> frozenset[int]:
        """Notes the end of a probe that still holds its devices.

        Returns:
            Positions of the nodes to avoid when it is run again; empty: it is not run again.
        """
        names = [self.roster.name(share.node) for share in trial.placement]
        if outcome.state == "completed":
            for name, why in self.completed(trial.key, names).items():
                if (index := self.roster.position(name)) is not None:
                    self.roster.quarantine(index, why)
            return frozenset()
        suspected = self.failed(trial.key, names, outcome)
        suspects = frozenset(
            share.node for share in trial.placement if self.roster.name(share.node) in suspected
        )
        if not self._has_others(trial, suspects):
            self.forget(trial.key)
            return frozenset()
        return suspects

    def _has_others(self, trial: HeldTrial, suspects: frozenset[int]) -> bool:
        layout = trial.request.layout
        per_node = -(-layout.num_devices // layout.num_nodes)
        others = [index for index in self.roster.usable() if index not in suspects]
        large_enough = sum(size >= per_node for size in self.roster.sizes(others))
        return large_enough >= layout.num_nodes

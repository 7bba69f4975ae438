"""The interface of the nodes of a launcher, and what they report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from layout_tuner.workers.ranks.json_lines import Document
from layout_tuner.workers.ranks.rank_task import Device, RankTask

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
    labels: Mapping[str, str] = field(default_factory=dict)
    """Ray's labels of the node."""
    switches: tuple[str, ...] = ()
    """Slurm's switches or block above the node, the lowest first."""

    def capacity(self, device: Device) -> int:
        """Ranks that it holds without sharing devices; a CPU device needs a core."""
        return min(self.num_devices, self.num_cores) if device == "cpu" else self.num_devices


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEvent:
    """An event on a node: a report, an exit, or the loss of the node."""

    node: int
    """Position in `NodeSet.nodes`."""
    document: Document


class LaunchedNodes(Protocol):
    """The nodes of a launcher, identified by their position. Any thread may call it."""

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes, in order. There may be more later, at the end; none is ever taken out."""

    def lost(self) -> Mapping[int, str]:
        """Nodes that can't be used now, and why."""

    def agent_ends(self, node: int, /) -> int:
        """How often a node was lost by the end of its agent, or of what runs the agent.

        That is not counted against the layout that ran there. 0 where ranks have no such process.
        """

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

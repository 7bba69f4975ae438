"""What runs probes: the interface of every launcher, and of the nodes below it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from search_spaces.outcome import Outcome, ProbeRequest
from workers.json_lines import Document
from workers.packing.shares import Placement
from workers.rank_task import Device, RankTask

OnEvent = Callable[[Document], None]
"""Is told what ranks report while they run, in the order of arrival."""

Cancelled = Callable[[], bool]
"""Says whether the run shall end now."""


class Launcher(Protocol):
    """Runs groups of ranks; no failure of a probe is an exception.

    Any thread may call it. Groups that run at the same time hold disjoint shares: whoever calls
    sees to that.
    """

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes, in order. There may be more later, at the end; none is ever taken out."""
        ...

    def run(
        self,
        request: ProbeRequest,
        *,
        shares: Placement | None = None,
        on_event: OnEvent,
        cancelled: Cancelled,
    ) -> Outcome:
        """Runs a probe to its end; no process of it is left when this returns.

        Args:
            request: the probe.
            shares: devices that it holds meanwhile; None: as many as it needs, from the front.
            on_event: is told {"event": "listening"} when the first rank is there, and the
                iterations, each with its "index" and "step_time_s".
            cancelled: whether it shall end.

        Raises:
            RanksLeftError: a process of it can't be ended; its nodes must not be used again.
        """
        ...

    def train(
        self, job: Mapping[str, Any], *, on_event: OnEvent, cancelled: Cancelled
    ) -> TrainingEnd:
        """Runs a training job (the document of an export) to its end."""
        ...

    def lost(self) -> Mapping[int, str]:
        """Nodes that can't be used now, by position, and why."""
        ...

    def recover(self, node: int, /) -> None:
        """Makes a lost node usable again, while groups run on others.

        Raises:
            WorkerError: it is not possible, for now.
        """
        ...

    def close(self) -> None:
        """Ends every process that the launcher has started."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingEnd:
    """How a training job ended."""

    result: Mapping[str, Any] | None
    """What rank 0 returned; None: it failed."""
    message: str = ""
    """What went wrong."""
    log_tail: str = ""
    """Last lines of the rank that failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node that ranks can be placed on."""

    name: str
    """Host name, for people."""
    address: str
    """Address that the other nodes reach it by."""
    num_devices: int
    """Devices that it is described with."""
    num_cores: int
    """Cores' worth of time that it gives us: fewer than the ids where a container has a quota."""
    core_ids: tuple[int, ...]
    """CPU numbers that it gives us."""
    device_cores: tuple[tuple[int, ...], ...] = ()
    """CPU numbers by device, where the site knows which are near; empty: equal contiguous shares."""

    def capacity(self, device: Device) -> int:
        """Ranks that it holds without sharing: a device of the CPU is no more than a core."""
        return min(self.num_devices, self.num_cores) if device == "cpu" else self.num_devices


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeEvent:
    """Something that happened on a node: a report, an exit, or its loss."""

    node: int
    """Position in `NodeSet.nodes`."""
    document: Document
    """As the zygote sent it."""


class NodeSet(Protocol):
    """Nodes with a zygote each, named by their position. Any thread may call it."""

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes, in order. There may be more later, at the end; none is ever taken out."""
        ...

    def wait_until_ready(self) -> None:
        """Waits until ranks can be forked at once.

        Raises:
            NodeLostError: a node does not get there.
        """
        ...

    def start(self, tasks: Mapping[int, Sequence[RankTask]]) -> None:
        """Forks the ranks of one group on some nodes.

        Where that takes its time, it happens after this has returned, between the events "starting" and
        "started" of the group, whose deadline counts from the latter.

        Raises:
            NodeLostError: on one of them it did not work; the others may have started.
        """
        ...

    def tell(self, nodes: Sequence[int], group: str, document: Document, /) -> None:
        """Sends a document to every rank of a group.

        Raises:
            NodeLostError: one of the nodes is gone.
        """
        ...

    def poll(self, nodes: Sequence[int], group: str, timeout_s: float, /) -> list[NodeEvent]:
        """What happened to a group, and to its nodes, since the last call.

        Waits for something up to the timeout. The loss of a node is told once to each group.
        """
        ...

    def end(self, nodes: Sequence[int], group: str, /) -> dict[int, str]:
        """Ends what is left of a group; returns the log tails by rank, of nodes that still live.

        Other groups on these nodes are left alone.

        Raises:
            RanksLeftError: something can't be ended.
        """
        ...

    def lost(self) -> Mapping[int, str]:
        """Nodes that can't be used now, and why."""
        ...

    def recover(self, node: int, /) -> None:
        """Replaces the agent and the zygote of a lost node; the others work on.

        Raises:
            WorkerError: it is not possible, for now.
        """
        ...

    def close(self) -> None:
        """Ends every process on every node."""
        ...

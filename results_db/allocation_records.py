"""What workers say of their allocations, and what the store knows of them: frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, get_args

AllocationState = Literal["starting", "working", "draining"]
"""starting: its nodes are not ready. draining: it takes no more trials, since its end is near."""
NodeState = Literal["starting", "checking", "idle", "busy", "recovering", "lost", "quarantined"]
"""recovering: what runs on it is built up anew. quarantined: no probe runs there until it is released."""
AttemptPhase = Literal["waiting", "starting", "iterating", "ending"]
"""waiting: leased, and no devices yet."""
Scheduler = Literal["slurm", "none"]

SCHEDULERS: Final[tuple[Scheduler, ...]] = get_args(Scheduler)
ALLOCATION_STATES: Final[tuple[AllocationState, ...]] = get_args(AllocationState)
NODE_STATES: Final[tuple[NodeState, ...]] = get_args(NodeState)
ATTEMPT_PHASES: Final[tuple[AttemptPhase, ...]] = get_args(AttemptPhase)


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationFacts:
    """What a worker knows of its allocation when it registers."""

    scheduler: Scheduler = "none"
    job_id: str | None = None
    """The scheduler's name for it."""
    launcher: str = ""
    """What starts its ranks; empty: it did not say."""
    ends_in_s: float | None = None
    """Seconds left; None: not known, or it does not end."""
    shares_nodes: bool = False
    """Whether several probes may run on one node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """A node of an allocation."""

    name: str
    num_devices: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """What a node does."""

    name: str
    state: NodeState
    doing: str = ""
    """In words: which probe runs there."""
    reason: str = ""
    """Why it is lost, or in quarantine."""
    free_devices: int | None = None
    health: Mapping[str, Any] | None = None
    """What its last check found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationStatus:
    """What a worker says of its allocation with a heartbeat."""

    state: AllocationState = "working"
    ends_in_s: float | None = None
    """Seconds left; None: as it said before."""
    idle_node_s: float = 0.0
    """Node-seconds held for no probe since this session began; only ever grows."""
    nodes: tuple[NodeStatus, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SetAside:
    """A node that no probe shall run on."""

    node: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatAnswer:
    """What a worker hears in answer to a heartbeat."""

    stop: tuple[int, ...] = ()
    """Trials to stop: cancelled, ended, or no longer leased by it."""
    release: tuple[str, ...] = ()
    """Nodes to take out of quarantine."""
    quarantine: tuple[SetAside, ...] = ()
    """Nodes to put into quarantine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What a trial may need of an allocation that is partly in use."""

    nodes: int
    """Whole nodes."""
    devices: int
    """Devices of one node that is in use partly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecord:
    """A node of an allocation as its worker said last."""

    name: str
    num_devices: int
    state: NodeState
    doing: str
    reason: str
    free_devices: int | None
    health: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantineRecord:
    """A node in quarantine, or one that was released."""

    cluster: str
    node: str
    reason: str
    since: datetime
    requested_by_user: bool
    released_at: datetime | None
    """None: it is in quarantine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeasedTrial:
    """A trial that a worker has leased, and what it does with it."""

    trial_id: int
    campaign: str
    number: int
    """The trial's number in its campaign."""
    attempt: int
    num_nodes: int
    num_devices: int
    leased_at: datetime
    phase: AttemptPhase | None
    """None: the worker did not say."""
    iterations_done: int
    held_s: float | None
    """Seconds that it has held its nodes; None: the worker did not say."""
    nodes_held: float | None
    """Nodes that it holds, a part of one included; None: those of its layout."""
    waiting_because: str
    """The worker's words while it waits for devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingTrial:
    """A trial that nobody has leased."""

    trial_id: int
    campaign: str
    number: int
    """The trial's number in its campaign."""
    cluster: str
    num_nodes: int
    num_devices: int
    deadline_s: float
    """Longest that its probe may take."""
    is_paused: bool
    """Whether its campaign is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterNode:
    """A node as the service knows it: who has it, and whether probes may run on it."""

    cluster: str
    name: str
    worker_id: str | None
    """The allocation that has it now; None: none has."""
    node: NodeRecord | None
    """What that allocation says of it."""
    quarantine: QuarantineRecord | None
    """None: nobody ever set it aside."""

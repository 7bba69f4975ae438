"""The documents of the worker protocol, as the worker says and hears them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Phase = Literal["waiting", "starting", "iterating", "ending"]
"""How far a leased trial is: waiting for devices, its ranks starting, at its iterations, ending."""

WorkerState = Literal["starting", "working", "draining"]

NodeState = Literal["starting", "checking", "idle", "busy", "lost", "recovering", "quarantined"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationIdentity:
    """What holds the worker's nodes."""

    scheduler: Literal["slurm", "none"] = "none"
    job_id: str | None = None
    """The scheduler's name for it."""
    launcher: str = ""
    """What starts ranks here."""
    ends_in_s: float | None = None
    """Seconds until the nodes are taken away; None: nobody says so."""
    shares_nodes: bool = False
    """Whether probes smaller than a node run side by side on one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeIdentity:
    """A node as it is introduced."""

    name: str
    num_devices: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerIdentity:
    """How a worker introduces itself."""

    name: str
    """Registering a name again ends its earlier session."""
    host: str
    """Where it runs."""
    cluster: str
    """Only campaigns of this cluster's name are leased to it."""
    num_nodes: int
    """Nodes of its allocation."""
    devices_per_node: int
    """Devices of each."""
    device: str
    """What one device is."""
    versions: Mapping[str, str]
    """Software, by name."""
    allocation: AllocationIdentity | None = None
    """What holds the nodes; None: nothing is said."""
    nodes: tuple[NodeIdentity, ...] = ()
    """The nodes by name, as far as they are known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeWish:
    """A node that shall not be used, and why."""

    node: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """A session of this worker with the service."""

    worker_id: str
    """To be sent with every request; it is unknown again once another session has begun."""
    heartbeat_interval_s: float
    """Seconds between heartbeats."""
    quarantined: tuple[NodeWish, ...] = ()
    """Nodes of this cluster that are under quarantine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRoom:
    """What a trial may need at most."""

    nodes: int
    """Whole nodes."""
    devices: int
    """Devices of one node, for a trial that needs no more than a part of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """A trial that this worker shall run."""

    trial_id: int
    attempt: int
    campaign: str
    number: int
    """The trial's number in its campaign."""
    request: Mapping[str, Any]
    """A `ProbeRequest` document."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """How far a leased trial is."""

    trial_id: int
    attempt: int
    iterations_done: int
    phase: Phase | None = None
    """None: nothing is said."""
    held_s: float | None = None
    """Seconds that it has held its nodes."""
    nodes_held: float | None = None
    """Nodes that it holds, or a fraction of one."""
    waiting_because: str | None = None
    """Why it does not run yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """What a node does."""

    name: str
    state: NodeState
    doing: str = ""
    """Its trials, for people."""
    reason: str = ""
    """Why it does nothing, for people."""
    free_devices: int = 0
    health: Mapping[str, Any] | None = None
    """What its last check measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStatus:
    """What the allocation does."""

    state: WorkerState
    ends_in_s: float | None
    """Seconds until the nodes are taken away; None: nobody says so."""
    idle_node_s: float
    """Node-seconds without a probe since the session began."""
    nodes: tuple[NodeStatus, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatAnswer:
    """What the service wishes."""

    stop: tuple[int, ...]
    """Ids of trials that shall end."""
    release: tuple[str, ...] = ()
    """Nodes to be taken out of quarantine."""
    quarantine: tuple[NodeWish, ...] = ()
    """Nodes to be put there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeReport:
    """The outcome of one attempt at a trial."""

    trial_id: int
    attempt: int
    worker_id: str
    outcome: Mapping[str, Any]
    """An `Outcome` document."""
    nodes_held: float | None = None
    """Nodes that it held, or a fraction of one; None: those of its layout."""
    iterations_s: float | None = None
    """Seconds of its duration that went into iterations; None: not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseAsk:
    """What trial is asked for."""

    wait_s: float
    """Seconds that the service may wait for one."""
    room: LeaseRoom | None = None
    """What it may need; None: what the allocation has."""
    longest_s: float | None = None
    """The longest deadline that its probe may have; None: any."""

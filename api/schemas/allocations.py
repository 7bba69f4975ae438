"""The documents of allocations and their nodes: what runs where, what waits, what it cost."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from api.schemas import CostRead, Document, Request
from results_db.allocation_records import AttemptPhase, NodeState, Scheduler

ShownState = Literal["starting", "working", "draining", "silent", "ended"]


class AllocationNodeRead(Document):
    """A node of an allocation, as its worker said last."""

    name: str
    num_devices: int
    state: NodeState
    doing: str
    """In words: which probe runs there."""
    reason: str
    """Why it is lost, or in quarantine."""
    free_devices: int | None
    """Devices that no probe holds; null: the worker does not say."""
    health: dict[str, Any] | None
    """What its last check found."""


class LeasedTrialRead(Document):
    """A trial that the allocation's worker has leased."""

    trial_id: int
    campaign: str
    number: int
    """The trial's number in its campaign."""
    attempt: int
    num_nodes: int
    num_devices: int
    leased_at: datetime
    phase: AttemptPhase | None
    """What becomes of it just now; null: the worker did not say."""
    iterations_done: int
    """Warm-up included."""
    held_s: float | None
    """Seconds that it has held its nodes; null: the worker did not say."""
    nodes_held: float | None
    """Nodes that it holds, a part of one included; null: those of its layout."""
    waiting_because: str
    """The worker's words while it waits for devices."""


class NotLeasedRead(Document):
    """A trial that nobody has leased, and why this allocation does not."""

    trial_id: int
    campaign: str
    number: int
    """The trial's number in its campaign."""
    num_nodes: int
    num_devices: int
    reason: str


class AllocationRead(Document):
    """Nodes that a worker holds for a while, and all that goes on there."""

    id: str
    """Of its worker's session."""
    name: str
    host: str
    cluster: str
    scheduler: Scheduler
    job_id: str | None
    """The scheduler's name for it."""
    launcher: str
    """What starts its ranks; empty: the worker did not say."""
    device: str
    num_nodes: int
    devices_per_node: int
    shares_nodes: bool
    """Whether several probes may run on one node."""
    state: ShownState
    """draining: it takes no more trials, since its end is near. silent: its worker was not heard of lately."""
    seconds_left: float | None
    """Until its end; null: not known, or it does not end."""
    registered_at: datetime
    seen_at: datetime
    status_at: datetime | None
    """When its worker last said what its nodes do; null: never."""
    ended_at: datetime | None
    nodes: list[AllocationNodeRead]
    """In the worker's order; empty: the worker does not say."""
    running: list[LeasedTrialRead]
    """Trials that hold nodes, the oldest first."""
    waiting: list[LeasedTrialRead]
    """Leased trials that wait for devices, and why."""
    num_not_leased: int
    """Trials of its cluster that nobody has leased."""
    not_leased: list[NotLeasedRead]
    """The oldest of them, and why each is not leased; none where the allocation has ended."""
    cost: CostRead
    """Of attempts that have ended; idle counts what it held for no probe as well."""


class AllocationPage(Document):
    """Allocations, the youngest first."""

    allocations: list[AllocationRead]


class QuarantineRead(Document):
    """Why no probe runs on a node."""

    reason: str
    since: datetime
    requested_by_user: bool
    """Whether a user asked for it; else a worker found the node at fault."""
    released_at: datetime | None
    """When it was released; null: it is in quarantine."""


class ClusterNodeRead(Document):
    """A node as the service knows it."""

    cluster: str
    name: str
    allocation: str | None
    """Id of the allocation that has it now; null: none has."""
    node: AllocationNodeRead | None
    """What that allocation says of it. A wish that was just made shows once its worker has acted on it."""
    quarantine: QuarantineRead | None
    """null: nobody ever set it aside."""


class NodePage(Document):
    """Nodes by cluster and name."""

    nodes: list[ClusterNodeRead]


class NodeQuarantineCreate(Request):
    """Why a node shall be set aside."""

    reason: Annotated[str, Field(min_length=1, max_length=1000)] = "asked for by a user"

"""The documents of workers, allocations and nodes."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field

from layout_tuner.api.schemas.campaigns_and_trials import CostRead, Document, Request
from layout_tuner.api.schemas.text_types import Reason
from layout_tuner.protocol.states import Scheduler
from layout_tuner.results_db.records import LeasedTrialRead, WorkerRecord
from layout_tuner.results_db.service_records import AllocationNodeRead, ClusterNodeRead

ShownState = Literal["starting", "working", "draining", "silent", "ended"]


class NotLeasedRead(Document):
    """A trial that no worker has leased, and why this allocation does not lease it."""

    trial_id: int
    campaign: str
    number: int
    """The trial's number in its campaign."""
    num_nodes: int
    num_devices: int
    reason: str


class AllocationRead(Document):
    """An allocation: the nodes of one worker, their trials and their cost."""

    id: str
    """The id of its worker's session."""
    name: str
    host: str
    cluster: str
    scheduler: Scheduler
    job_id: str | None
    """The scheduler's id of it."""
    launcher: str
    """The launcher of its ranks; empty: not reported."""
    device: str
    num_nodes: int
    devices_per_node: int
    shares_nodes: bool
    """Whether several probes may run on one node."""
    state: ShownState
    """draining: it takes no more trials, because it ends soon. silent: its worker sent no heartbeat
    lately."""
    seconds_left: float | None
    """Seconds until it ends; null: unknown, or never."""
    registered_at: datetime
    seen_at: datetime
    status_at: datetime | None
    """Time of the last status from its worker; null: there was none."""
    ended_at: datetime | None
    nodes: list[AllocationNodeRead]
    """In the worker's order; empty: not reported."""
    running: list[LeasedTrialRead]
    """Trials that hold nodes, the oldest first."""
    waiting: list[LeasedTrialRead]
    """Leased trials that wait for devices."""
    num_not_leased: int
    """Trials of its cluster that no worker has leased."""
    not_leased: list[NotLeasedRead]
    """The oldest of them, each with a reason; empty if the allocation has ended."""
    cost: CostRead
    """The cost of its ended attempts, and its idle node-seconds."""


class WorkerPage(Document):
    workers: list[WorkerRecord]
    """Workers with a recent heartbeat, the newest session first."""


class AllocationPage(Document):
    """Allocations, the newest first."""

    allocations: list[AllocationRead]


class NodePage(Document):
    """Nodes by cluster and name."""

    nodes: list[ClusterNodeRead]


class NodeQuarantineCreate(Request):
    """The reason to put a node into quarantine."""

    reason: Annotated[Reason, Field(min_length=1)] = "asked for by a user"

"""Records of nodes and of the audit, with which the API answers as they are; see `records`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypedDict

from layout_tuner.protocol.states import NodeState
from layout_tuner.results_db.actor import QuotaAction, QuotaKind, QuotaPeriod
from layout_tuner.results_db.records import QuarantineRead


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationNodeRead:
    """A node of an allocation, with the newest status from its worker."""

    name: str
    num_devices: int
    state: NodeState
    doing: str
    """The probe that runs there, in words."""
    reason: str
    """Why it is lost or in quarantine."""
    free_devices: int | None
    """Devices that no probe holds; null: not reported."""
    health: dict[str, Any] | None
    """Result of its last health check."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterNodeRead:
    """A node: its allocation, its status, and its quarantine."""

    cluster: str
    name: str
    allocation: str | None
    """Id of the allocation that has it now; null: none."""
    node: AllocationNodeRead | None
    """Its status in that allocation. An order shows here once its worker has followed it."""
    quarantine: QuarantineRead | None
    """null: it never was in quarantine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareRead:
    """What an owner has had of a cluster lately, and what it is entitled to."""

    cluster: str
    is_simulated: bool
    owner: str
    weight: float
    """Its own weight times the largest of those of its groups."""
    entitled: float
    """Its weight over the weights of all owners who have used, use or wait for the cluster."""
    had: float
    """Its part of their node-hours."""
    node_hours: float
    """With those of running trials; those of a half-life ago count half."""
    total_node_hours: float
    """Of all owners."""
    running: int
    """Trials."""
    waiting: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QuotaRead:
    """Most measured node-hours of an owner or a group in a period."""

    kind: QuotaKind
    name: str
    """Of the owner or the group; * as an owner: each that has no quota of its own."""
    period: QuotaPeriod
    """Of the calendar in UTC; weeks begin on Monday."""
    node_hours: float
    beyond: QuotaAction
    """refuse: a campaign whose budget is more than what is left is refused; wait: its trials wait
    for the next period. With both no trial starts once all node-hours are used."""
    until: datetime | None
    """When it ends for good; null: when it is removed."""
    used_node_hours: float | None
    """In this period, with those of running trials; null: of each owner another figure."""
    period_ends_at: datetime
    created_at: datetime
    created_by: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditEntryRead:
    """One change."""

    id: int
    at: datetime
    actor: str
    """The name of the token, or "system" for changes by the service itself."""
    role: str
    token_id: int | None
    """null: a token of the data directory, or the service itself."""
    address: str
    """Where the request came from; empty without a request."""
    action: str
    """For example "campaign.pause"."""
    target_kind: str
    target: str
    details: dict[str, Any]


class AuditChoice(TypedDict, total=False):
    """Which changes of the audit log are listed; None is no condition."""

    actor: str | None
    action: str | None
    target_kind: str | None
    target: str | None
    since: datetime | None
    until: datetime | None

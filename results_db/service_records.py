"""Records of nodes, owners and the audit, with which the API answers as they are; see `records`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypedDict

from layout_tuner.protocol.states import NodeState
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
class OwnerRead:
    """Somebody to whom campaigns belong."""

    name: str
    weight: float
    """In fair shares: twice the weight gets twice the node-hours while others wait too."""
    groups: tuple[str, ...]
    """By name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRead:
    """A group of owners, who see each other's campaigns that are for the group."""

    name: str
    weight: float
    members: tuple[str, ...]
    """Owners, by name."""


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

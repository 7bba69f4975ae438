"""Records of nodes and of the audit, with which the API answers as they are; see `records`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypedDict

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


WEBHOOK_FORMATS: Final = ("standard", "slack", "mattermost")
CAMPAIGN_NOTICES: Final = ("campaign.ended", "campaign.new_winner", "quota.at_80_percent")
ADMIN_NOTICES: Final = ("node.set_aside", "worker.lost")
"""Events that webhooks send; the latter only those that an administrator made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WebhookMessageRead:
    """A message to a webhook."""

    message_id: str
    """The same in every attempt, so that a receiver can drop repeats."""
    kind: str
    at: datetime
    state: str
    """waiting, delivered or given up."""
    attempts: int
    problem: str
    """Why the last attempt failed; empty: it did not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WebhookRead:
    """An address to which an owner has messages of events sent."""

    id: int
    owner: str
    address: str
    format: str
    events: Sequence[str]
    campaigns: str
    """Of which campaigns: a name, or a pattern with * and ?."""
    off_because: str
    """Why nothing is sent; empty: it is on."""
    messages: Sequence[WebhookMessageRead]
    """The last five, the newest first."""
    secret: str | None = None
    """Receivers check signatures with it; null unless it is new."""

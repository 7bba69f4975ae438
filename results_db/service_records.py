"""Records of nodes, owners and the audit, with which the API answers as they are; see `records`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Final, Literal, TypedDict, get_args

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
class OwnerRead:
    """Somebody to whom campaigns belong."""

    name: str
    weight: float
    """In fair shares: twice the weight gets twice the node-hours while others wait too."""
    subject: str | None
    """Whom a provider signs in as this owner: issuer, # and `sub`; null: nobody."""
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


UsageBy = Literal["owner", "group", "campaign", "cluster"]
USAGE_BY: Final[tuple[UsageBy, ...]] = get_args(UsageBy)


class UsageChoice(TypedDict, total=False):
    """Which usage is read, as `GET /v1/usage` takes it."""

    by: UsageBy
    since: str
    until: str | None
    simulated: bool
    tokens: str


USAGE_PARTS: Final = ("probes", "repeats", "idle", "lost", "idle_allocations")


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageRow:
    """Node-hours in a period by use, with the campaigns and trials that they are of."""

    name: str | None
    """Of the owner, group, campaign or cluster; null: campaigns without a group, or all."""
    campaign_id: int | None = None
    """With by=campaign; null: it was deleted."""
    campaigns: int
    """Campaigns with an attempt or idle allocations in the period."""
    trials: int
    """Trials that a worker had, and that ended in the period."""
    probes: float
    """Node-hours of the start and the iterations of first runs of layouts."""
    repeats: float
    """The same of further runs of layouts."""
    idle: float
    """Devices that probes held and did not use."""
    lost: float
    """Attempts without a result."""
    idle_allocations: float
    """The campaigns' shares of allocations that stood idle."""
    node_hours: float
    """Their sum."""
    money: dict[str, float]
    """What they cost by currency; empty: no cluster states a price."""
    saved_node_hours: float | None
    """What tuned jobs save: node-hours of a training job with the baseline, less those with the
    winner, over the campaigns that ended in the period; null: none of them ranked both."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UsageRead:
    """Usage in a period."""

    by: UsageBy
    since: date
    """The first day of the period, in UTC."""
    until: date
    """Its last day."""
    simulated: bool
    """Whether it is of simulated campaigns, or of measured ones."""
    tokens: int
    """Tokens of the training job of each campaign whose savings are counted."""
    rows: list[UsageRow]
    """The largest first."""
    total: UsageRow
    days: list[UsageRow]
    """By day, in order; days without usage are left out."""


WebhookFormat = Literal["standard", "slack", "mattermost"]
WEBHOOK_FORMATS: Final = get_args(WebhookFormat)
Notice = Literal[
    "campaign.ended", "campaign.new_winner", "quota.at_80_percent", "node.set_aside", "worker.lost"
]
"""Events of which webhooks send word."""
NOTICES: Final[tuple[Notice, ...]] = get_args(Notice)


@dataclass(frozen=True, kw_only=True, slots=True)
class WebhookRead:
    """An address to which an owner has messages of events sent."""

    id: int
    owner: str
    address: str
    format: str
    events: Sequence[str]
    off_because: str
    """Why nothing is sent until a test turns it on; empty: it is on."""
    tried_at: datetime | None
    """When the last attempt to send a message ended; null: none since it was made or tested."""
    problem: str
    """Why that attempt failed; empty: it did not."""
    num_given_up: int
    """Messages that could not be delivered within a day."""
    secret: str | None = None
    """Receivers check signatures with it; null unless the webhook is new."""

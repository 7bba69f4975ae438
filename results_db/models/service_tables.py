"""Tables of the service: tokens, audit, models, clusters, plans, drivers, workers, events.

A column without a description is the field of its name in a record (see `tables`).
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    ColumnElement,
    ForeignKey,
    Index,
    Integer,
    String,
    Text,
    UniqueConstraint,
    false,
)
from sqlalchemy.orm import Mapped, declared_attr, mapped_column

from layout_tuner.protocol.states import ALLOCATION_STATES, NODE_STATES, SCHEDULERS
from layout_tuner.results_db.actor import (
    MEMBER_SOURCES,
    QUOTA_ACTIONS,
    QUOTA_KINDS,
    QUOTA_PERIODS,
    TOKEN_ROLES,
)
from layout_tuner.results_db.models.table_base import (
    Base,
    index_where,
    is_over_zero,
    one_of,
    part_of,
    sum_column,
)
from layout_tuner.results_db.records import PLAN_STATES


class TokenRow(Base):
    """A token; only its hash is stored."""

    __tablename__ = "tokens"
    __table_args__ = (
        CheckConstraint(one_of("role", TOKEN_ROLES), name="role"),
        CheckConstraint("length(secret_hash) = 64", name="is_hashed"),
        index_where("uq_tokens_name_live", "name", "revoked_at IS NULL"),
        Index("uq_tokens_device_key", "device_key", unique=True),
        Index("uq_tokens_user_code", "user_code", unique=True),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    """Its name, as in the audit log."""
    owner: Mapped[str] = mapped_column(String(64), server_default="")
    """The owner whom it acts for, as in `campaigns.created_by`."""
    role: Mapped[str] = mapped_column(String(16))
    secret_hash: Mapped[str] = mapped_column(String(64), unique=True)
    """SHA-256 of the token, in hexadecimal; tokens are random, so no slower hash is needed."""
    created_at: Mapped[datetime]
    created_by: Mapped[str] = mapped_column(String(64))
    expires_at: Mapped[datetime | None]
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    source: Mapped[str | None] = mapped_column(String(255))
    """The issuer or proxy's header whose sessions stand for the token; nobody knows it."""
    # The rest is of a sign-in by `login --device`, whose token is replaced before it expires.
    device_key: Mapped[str | None] = mapped_column(String(64))
    """The hash of the part of its secret that stays."""
    device_part: Mapped[str | None] = mapped_column(String(64))
    """The hash of the part of its secret that each use replaces."""
    part_before: Mapped[str | None] = mapped_column(String(64))
    """The hash of the part before, while it is accepted once more; empty: there was no token."""
    user_code: Mapped[str | None] = mapped_column(String(64))
    """The hash of the code that a person compares; None: it was decided."""
    asked_from: Mapped[str | None] = mapped_column(String(320))
    asked_at: Mapped[datetime | None]
    """When its secret was last used."""
    allowed_by: Mapped[str | None] = mapped_column(String(64))
    """The hash of the token that allowed it, which has to be valid too."""
    ends_at: Mapped[datetime | None]
    """None: nobody has allowed it."""


class Weighted:
    """Columns of a name with a weight in fair shares."""

    @declared_attr.directive
    def __table_args__(cls) -> tuple[CheckConstraint]:  # noqa: N805 - as SQLAlchemy has it
        return (CheckConstraint(is_over_zero("weight"), name="weight"),)

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    weight: Mapped[float] = mapped_column(default=1.0, server_default="1")
    created_at: Mapped[datetime]
    created_by: Mapped[str] = mapped_column(String(64))


class OwnerRow(Weighted, Base):
    """Somebody to whom campaigns belong; a token or a sign-in acts for an owner."""

    __tablename__ = "owners"

    subject: Mapped[str | None] = mapped_column(Text, unique=True)
    """Whom a provider signs in as this owner: the issuer, a #, and its `sub`; None: nobody."""


class GroupRow(Weighted, Base):
    """A group of owners."""

    __tablename__ = "owner_groups"


class GroupMember(Base):
    """An owner in a group."""

    __tablename__ = "group_members"
    __table_args__ = (
        CheckConstraint(one_of("source", MEMBER_SOURCES), name="source"),
        Index(None, "owner", "group_name"),
    )

    group_name: Mapped[str] = part_of("owner_groups.name")
    owner: Mapped[str] = part_of("owners.name")
    source: Mapped[str] = mapped_column(String(8))
    """Who says so: an administrator, or a claim of the sign-in, which the next sign-in renews."""


class QuotaRow(Base):
    """Most node-hours of an owner or a group in a period."""

    __tablename__ = "quotas"
    __table_args__ = (
        CheckConstraint(one_of("kind", QUOTA_KINDS), name="kind"),
        CheckConstraint(one_of("period", QUOTA_PERIODS), name="period"),
        CheckConstraint(one_of("beyond", QUOTA_ACTIONS), name="beyond"),
        CheckConstraint(is_over_zero("node_hours"), name="node_hours"),
    )

    kind: Mapped[str] = mapped_column(String(8), primary_key=True)
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    """Of the owner or the group; * as an owner: each that has no quota of its own."""
    period: Mapped[str] = mapped_column(String(8), primary_key=True)
    node_hours: Mapped[float]
    beyond: Mapped[str] = mapped_column(String(8))
    until: Mapped[datetime | None]
    """None: until it is removed."""


class PastUse(Base):
    """Node-seconds of a campaign on a day, in UTC.

    Attempts count on the day on which they first ended. It has no foreign key, since it stays when
    its campaign is deleted.
    """

    __tablename__ = "past_use"

    campaign_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    day: Mapped[str] = mapped_column(String(10), primary_key=True, index=True)
    """As 2026-01-31."""
    probes: Mapped[float] = sum_column()
    """These parts are as in `UsageRow`."""
    repeats: Mapped[float] = sum_column()
    idle: Mapped[float] = sum_column()
    lost: Mapped[float] = sum_column()
    idle_allocations: Mapped[float] = sum_column()
    trials: Mapped[int] = mapped_column(default=0, server_default="0")
    saved_node_hours: Mapped[float | None]
    """By the tuned job, for 10^12 tokens; on the day on which the campaign ended."""
    owner: Mapped[str] = mapped_column(String(64))
    group: Mapped[str | None] = mapped_column("group_name", String(64))
    """It changes with that of the campaign."""
    visibility: Mapped[str | None] = mapped_column(String(8))
    """Of a deleted campaign; None: it is there, and says who sees it."""
    name: Mapped[str] = mapped_column(String(200))
    cluster: Mapped[str] = mapped_column(String(200))
    trainer: Mapped[str] = mapped_column(String(64))
    node_hour_price: Mapped[str] = mapped_column(String(32), server_default="")


class BrowserSignIn(Base):
    """A one-time code, or a session of a browser. Backups do not contain these rows."""

    __tablename__ = "browser_sign_ins"
    __table_args__ = (
        CheckConstraint(one_of("kind", ("code", "session")), name="kind"),
        CheckConstraint("length(secret_hash) = 64", name="is_hashed"),
        Index(None, "token_hash", "kind", "expires_at"),
        Index(None, "expires_at"),
    )

    secret_hash: Mapped[str] = mapped_column(String(64), primary_key=True)
    """SHA-256 of the code, or of the cookie's secret."""
    kind: Mapped[str] = mapped_column(String(8))
    token_hash: Mapped[str] = mapped_column(String(64))
    """SHA-256 of the token that it stands for. Without a foreign key: tokens of the data directory
    are not in the database."""
    created_at: Mapped[datetime]
    expires_at: Mapped[datetime]
    id_token: Mapped[str | None] = mapped_column(Text)
    """Names the session to the provider at sign-out; None: no provider began it."""


class AuditRow(Base):
    """One change: the actor, the time, and the target."""

    __tablename__ = "audit"
    __table_args__ = (Index(None, "actor", "id"), Index(None, "target_kind", "target", "id"))

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(index=True)
    actor: Mapped[str] = mapped_column(String(64))
    role: Mapped[str] = mapped_column(String(16))
    token_id: Mapped[int | None] = mapped_column(ForeignKey("tokens.id"))
    address: Mapped[str] = mapped_column(String(64), default="")
    action: Mapped[str] = mapped_column(String(40))
    target_kind: Mapped[str] = mapped_column(String(20))
    target: Mapped[str] = mapped_column(String(255))
    """Its name, or its id if it has no name."""
    details: Mapped[dict[str, Any]]


class IdempotencyKey(Base):
    """The campaign that a request with this key created."""

    __tablename__ = "idempotency_keys"

    actor: Mapped[str] = mapped_column(String(64), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    request_hash: Mapped[str] = mapped_column(String(64))
    """SHA-256 of the request: the same key with another request is refused."""
    campaign_id: Mapped[int] = mapped_column(
        ForeignKey("campaigns.id", ondelete="CASCADE"), index=True
    )
    created_at: Mapped[datetime] = mapped_column(index=True)


class OwnDescription(Base):
    """A model or cluster that a user stored, in full."""

    __abstract__ = True

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    description: Mapped[dict[str, Any]]
    notes: Mapped[str] = mapped_column(Text, default="", server_default="")
    """Values that were assumed."""
    created_by: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class UserModel(OwnDescription):
    """A model's shape."""

    __tablename__ = "user_models"


class UserCluster(OwnDescription):
    """A cluster's description."""

    __tablename__ = "user_clusters"


class PlanRow(Base):
    """A campaign whose plan was requested; it is deleted a day later."""

    __tablename__ = "plans"
    __table_args__ = (
        CheckConstraint(one_of("state", PLAN_STATES), name="state"),
        CheckConstraint("(state = 'WAITING') = (ended_at IS NULL)", name="end"),
        Index(None, "state", "id"),
        # The id of a deleted plan never names another one.
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(String(8), default="WAITING")
    created_by: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    spec: Mapped[dict[str, Any]]
    """The campaign, as `CampaignSpec.to_mapping` gives it."""
    options: Mapped[dict[str, Any]]
    """`PlanOptions` as a mapping."""
    answer: Mapped[dict[str, Any]]
    problem: Mapped[str] = mapped_column(Text)


class DriverLeaseRow(Base):
    """The lease of the active driver; one row, which the migration adds."""

    __tablename__ = "driver_lease"
    __table_args__ = (CheckConstraint("id = 1", name="is_one"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    fence: Mapped[int] = mapped_column(BigInteger)
    host: Mapped[str] = mapped_column(String(255))
    pid: Mapped[int]
    since: Mapped[datetime | None]
    seen_at: Mapped[datetime | None]
    released_at: Mapped[datetime | None]


class SweepRow(Base):
    """Time of the last sweep for expired leases, by any process; one row."""

    __tablename__ = "sweeps"
    __table_args__ = (CheckConstraint("id = 1", name="is_one"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    swept_at: Mapped[datetime | None]
    """None: never."""


class WorkerRow(Base):
    """A session of a worker; a name has at most one open session."""

    __tablename__ = "workers"
    __table_args__ = (
        CheckConstraint("num_nodes >= 1 AND devices_per_node >= 1", name="holds_devices"),
        CheckConstraint(one_of("scheduler", SCHEDULERS), name="scheduler"),
        CheckConstraint(one_of("state", ALLOCATION_STATES), name="state"),
        CheckConstraint("idle_node_seconds >= 0", name="costs_not_negative"),
        index_where("uq_workers_name_live", "name", "ended_at IS NULL"),
        Index(None, "cluster", "seen_at"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    host: Mapped[str] = mapped_column(String(255))
    cluster: Mapped[str] = mapped_column(String(200))
    num_nodes: Mapped[int] = mapped_column(Integer)
    num_unusable: Mapped[int] = mapped_column(default=0, server_default="0")
    devices_per_node: Mapped[int] = mapped_column(Integer)
    device: Mapped[str] = mapped_column(String(255))
    versions: Mapped[dict[str, Any]]
    trainers: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    trainer_parameters: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    """By trainer and parameter; those of a trainer that is not here were not reported."""
    trainer_knobs: Mapped[dict[str, Any]] = mapped_column(default=dict, server_default="{}")
    """Job knobs by trainer and name; those of a trainer that is not here were not reported."""
    registered_at: Mapped[datetime]
    seen_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    scheduler: Mapped[str] = mapped_column(String(16), server_default="none")
    job_id: Mapped[str | None] = mapped_column(String(64))
    launcher: Mapped[str] = mapped_column(String(40), server_default="")
    ends_at: Mapped[datetime | None]
    shares_nodes: Mapped[bool] = mapped_column(server_default=false())
    state: Mapped[str] = mapped_column(String(16), server_default="working")
    idle_node_seconds: Mapped[float] = sum_column()
    idle_shared_node_seconds: Mapped[float] = sum_column()
    """The part of `idle_node_seconds` that campaigns have been charged with."""
    status_at: Mapped[datetime | None]
    registered_by: Mapped[str] = mapped_column(String(64), server_default="")
    """Name of the token that registered it; only that token acts for it."""


WORKER_ALIVE_S: Final = 30.0
"""A worker is live for so many seconds after its last heartbeat."""


def is_there(now: datetime) -> ColumnElement[bool]:
    """Whether a session is open, and its last heartbeat was lately.

    A heartbeat in the future, seen after the clock was set back, does not count.
    """
    lately = timedelta(seconds=WORKER_ALIVE_S)
    return (
        WorkerRow.ended_at.is_(None)
        & (WorkerRow.seen_at > now - lately)
        & (WorkerRow.seen_at < now + lately)
    )


class AllocationNode(Base):
    """A node of an allocation, as reported last."""

    __tablename__ = "allocation_nodes"
    __table_args__ = (
        CheckConstraint(one_of("state", NODE_STATES), name="state"),
        Index(None, "name"),
    )

    worker_id: Mapped[str] = part_of("workers.id")
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    position: Mapped[int]
    """Position in the worker's list."""
    num_devices: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    doing: Mapped[str] = mapped_column(Text)
    reason: Mapped[str] = mapped_column(Text)
    free_devices: Mapped[int | None]
    health: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class NodeQuarantine(Base):
    """A node that is, or was, in quarantine: no probe of the workers in its scope runs on it."""

    __tablename__ = "node_quarantines"

    cluster: Mapped[str] = mapped_column(String(200), primary_key=True)
    node: Mapped[str] = mapped_column(String(255), primary_key=True)
    scope: Mapped[str] = mapped_column(String(64), primary_key=True, default="", server_default="")
    reported_by: Mapped[str] = mapped_column(String(64), default="", server_default="")
    reason: Mapped[str] = mapped_column(Text)
    since: Mapped[datetime]
    requested_by_user: Mapped[bool]
    released_at: Mapped[datetime | None]
    release_pending: Mapped[bool] = mapped_column(default=False)
    """Whether it was released, and a worker still reports the quarantine."""
    release_told_at: Mapped[datetime | None]
    """When a worker first got the order to release it; None: not yet."""


class EventRow(Base):
    """An event of a campaign.

    Without a foreign key: on PostgreSQL an insert would lock the campaign's row, which a
    transaction that ends a trial holds. The events are deleted with their campaign explicitly.
    """

    __tablename__ = "events"
    __table_args__ = (
        Index(None, "campaign_id", "seq"),
        index_where("ix_events_unsequenced", "id", "seq IS NULL", unique=False),
    )

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    )
    seq: Mapped[int | None] = mapped_column(BigInteger, unique=True)
    """Its number in the order of readers, assigned after the commit; None: not assigned yet."""
    campaign_id: Mapped[int]
    trial_id: Mapped[int | None]
    kind: Mapped[str] = mapped_column(String(40))
    at: Mapped[datetime]
    data: Mapped[dict[str, Any]]
    owner: Mapped[str | None] = mapped_column(String(64))
    """Of a deleted campaign, whose row is gone: whom it belonged to; the next two are of it too."""
    visibility: Mapped[str | None] = mapped_column(String(8))
    group: Mapped[str | None] = mapped_column("group_name", String(64))


class EventCounter(Base):
    """The last number that was assigned; it never decreases."""

    __tablename__ = "event_counter"
    __table_args__ = (CheckConstraint("id = 1", name="is_one"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    last_seq: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    pruned_seq: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    """The last number among deleted events."""


class WebhookRow(Base):
    """An address to which an owner has messages sent, with the secret that signs them."""

    __tablename__ = "webhooks"

    id: Mapped[int] = mapped_column(primary_key=True)
    owner: Mapped[str] = mapped_column(String(64), index=True)
    address: Mapped[str] = mapped_column(Text)
    format: Mapped[str] = mapped_column(String(12))
    events: Mapped[list[str]] = mapped_column(JSON)
    link: Mapped[str] = mapped_column(Text)
    """The service's address for links, of the request that made the webhook."""
    signing_secret: Mapped[str] = mapped_column(String(64))
    off_because: Mapped[str] = mapped_column(Text, default="")
    tried_at: Mapped[datetime | None]
    problem: Mapped[str] = mapped_column(Text, default="")
    num_given_up: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[datetime]


class MessageRow(Base):
    """A message of the outbox, written in the transaction of its event."""

    __tablename__ = "webhook_messages"
    __table_args__ = (
        CheckConstraint(one_of("state", ("waiting", "delivered", "given up")), name="state"),
        UniqueConstraint("webhook_id", "message_id"),
        Index(None, "webhook_id", "state", "id"),
        Index(None, "webhook_id", "campaign_id", "state", "id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    webhook_id: Mapped[int] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    message_id: Mapped[str] = mapped_column(String(40))
    campaign_id: Mapped[int]
    """Messages with the same are sent in order; 0: of no campaign; below 0: a test. No foreign
    key: the end of a campaign is reported also after its deletion."""
    kind: Mapped[str] = mapped_column(String(40))
    at: Mapped[datetime] = mapped_column(index=True)
    data: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(String(12), default="waiting")
    attempts: Mapped[int] = mapped_column(default=0)
    next_at: Mapped[datetime]

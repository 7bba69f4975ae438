"""The tables of access, of users' own things, and of what the service's processes agree on."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, Index, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from results_db.actor import TOKEN_ROLES
from results_db.base import Base, one_of


class TokenRow(Base):
    """A token that was handed out; what it reads is known to its holder alone."""

    __tablename__ = "tokens"
    __table_args__ = (
        CheckConstraint(one_of("role", TOKEN_ROLES), name="role"),
        CheckConstraint("length(secret_hash) = 64", name="is_hashed"),
        Index(
            "uq_tokens_name_live",
            "name",
            unique=True,
            sqlite_where=text("revoked_at IS NULL"),
            postgresql_where=text("revoked_at IS NULL"),
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    """Whose it is: what the audit and `campaigns.created_by` say."""
    role: Mapped[str] = mapped_column(String(16))
    secret_hash: Mapped[str] = mapped_column(String(64), unique=True)
    """SHA-256 of the whole token, in hexadecimal: it is random, so nothing slower is needed."""
    created_at: Mapped[datetime]
    created_by: Mapped[str] = mapped_column(String(64))
    expires_at: Mapped[datetime | None]
    """None: it does not expire."""
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    """To the minute or so; None: never."""


class AuditRow(Base):
    """One change: who made it, when, and of what."""

    __tablename__ = "audit"
    __table_args__ = (Index(None, "actor", "id"), Index(None, "target_kind", "target", "id"))

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime] = mapped_column(index=True)
    actor: Mapped[str] = mapped_column(String(64))
    role: Mapped[str] = mapped_column(String(16))
    token_id: Mapped[int | None] = mapped_column(ForeignKey("tokens.id"))
    address: Mapped[str] = mapped_column(String(64), default="")
    """Where the request came from; empty where no request made the change."""
    action: Mapped[str] = mapped_column(String(40))
    """A thing and what was done with it, as "campaign.pause"."""
    target_kind: Mapped[str] = mapped_column(String(20))
    target: Mapped[str] = mapped_column(String(255))
    """Its name, or its id where it has none."""
    details: Mapped[dict[str, Any]]


class IdempotencyKey(Base):
    """What became of a request that its sender may send again."""

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
    """A description under a name of the users' own, written out as campaigns have it."""

    __abstract__ = True

    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    description: Mapped[dict[str, Any]]
    notes: Mapped[str] = mapped_column(Text, default="", server_default="")
    """What was guessed of it."""
    created_by: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime]
    updated_at: Mapped[datetime]


class UserModel(OwnDescription):
    """A model's shape."""

    __tablename__ = "user_models"


class UserCluster(OwnDescription):
    """A cluster's description."""

    __tablename__ = "user_clusters"


class DriverLeaseRow(Base):
    """Which driver is active; one row, which the migration writes."""

    __tablename__ = "driver_lease"
    __table_args__ = (CheckConstraint("id = 1", name="is_one"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    fence: Mapped[int] = mapped_column(BigInteger)
    """Number of the tenure; it grows with every takeover."""
    host: Mapped[str] = mapped_column(String(255))
    pid: Mapped[int]
    since: Mapped[datetime | None]
    seen_at: Mapped[datetime | None]
    """When the driver was last at work; None: there was none yet."""
    released_at: Mapped[datetime | None]


class SweepRow(Base):
    """When leases were last looked through, by any of the service's processes; one row."""

    __tablename__ = "sweeps"
    __table_args__ = (CheckConstraint("id = 1", name="is_one"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    swept_at: Mapped[datetime | None]
    """None: never."""

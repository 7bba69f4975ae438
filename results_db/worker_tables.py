"""The tables of workers: their sessions, the nodes of their allocations, nodes that are set aside."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    CheckConstraint,
    ForeignKey,
    Index,
    Integer,
    String,
    Text,
    false,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from results_db.allocation_records import ALLOCATION_STATES, NODE_STATES, SCHEDULERS
from results_db.base import Base, nothing_yet, one_of


class Worker(Base):
    """One session of a worker; a name has at most one that has not ended."""

    __tablename__ = "workers"
    __table_args__ = (
        CheckConstraint("num_nodes >= 1 AND devices_per_node >= 1", name="holds_devices"),
        CheckConstraint(one_of("scheduler", SCHEDULERS), name="scheduler"),
        CheckConstraint(one_of("state", ALLOCATION_STATES), name="state"),
        CheckConstraint("idle_node_seconds >= 0", name="costs_not_negative"),
        Index(
            "uq_workers_name_live",
            "name",
            unique=True,
            sqlite_where=text("ended_at IS NULL"),
            postgresql_where=text("ended_at IS NULL"),
        ),
        Index(None, "cluster", "seen_at"),
    )

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    host: Mapped[str] = mapped_column(String(255))
    cluster: Mapped[str] = mapped_column(String(200))
    num_nodes: Mapped[int] = mapped_column(Integer)
    devices_per_node: Mapped[int] = mapped_column(Integer)
    device: Mapped[str] = mapped_column(String(255))
    versions: Mapped[dict[str, Any]]
    registered_at: Mapped[datetime]
    seen_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    scheduler: Mapped[str] = mapped_column(String(16), server_default="none")
    job_id: Mapped[str | None] = mapped_column(String(64))
    launcher: Mapped[str] = mapped_column(String(40), server_default="")
    """Empty: the worker did not say."""
    ends_at: Mapped[datetime | None]
    """When its allocation ends; None: not known, or never."""
    shares_nodes: Mapped[bool] = mapped_column(server_default=false())
    state: Mapped[str] = mapped_column(String(16), server_default="working")
    idle_node_seconds: Mapped[float] = nothing_yet()
    """What it has held for no probe, as it said last."""
    idle_shared_node_seconds: Mapped[float] = nothing_yet()
    """How much of that campaigns have been charged with."""
    status_at: Mapped[datetime | None]
    """When it last said what its nodes do; None: never."""


class AllocationNode(Base):
    """A node of an allocation, as its worker said last."""

    __tablename__ = "allocation_nodes"
    __table_args__ = (
        CheckConstraint(one_of("state", NODE_STATES), name="state"),
        Index(None, "name"),
    )

    worker_id: Mapped[str] = mapped_column(
        ForeignKey("workers.id", ondelete="CASCADE"), primary_key=True
    )
    name: Mapped[str] = mapped_column(String(255), primary_key=True)
    position: Mapped[int]
    """Place in the worker's list."""
    num_devices: Mapped[int]
    state: Mapped[str] = mapped_column(String(16))
    doing: Mapped[str] = mapped_column(Text)
    reason: Mapped[str] = mapped_column(Text)
    free_devices: Mapped[int | None]
    health: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class NodeQuarantine(Base):
    """A node that no probe shall run on, or that was released again."""

    __tablename__ = "node_quarantines"

    cluster: Mapped[str] = mapped_column(String(200), primary_key=True)
    node: Mapped[str] = mapped_column(String(255), primary_key=True)
    reason: Mapped[str] = mapped_column(Text)
    since: Mapped[datetime]
    requested_by_user: Mapped[bool]
    released_at: Mapped[datetime | None]
    """When a user released it; None: it is in quarantine."""
    release_pending: Mapped[bool] = mapped_column(default=False)
    """Whether a worker still shows it in quarantine that was released."""
    release_told_at: Mapped[datetime | None]
    """When a worker was first told of that; None: none was."""

"""The tables of events: what happened to campaigns and their trials, in an order that readers can follow."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Index, Integer, String, text
from sqlalchemy.orm import Mapped, mapped_column

from results_db.base import Base


class EventRow(Base):
    """Something that happened to a campaign.

    No foreign key: on PostgreSQL an insert would lock the campaign's row, which whoever ends a trial
    holds; whoever deletes a campaign deletes its events.
    """

    __tablename__ = "events"
    __table_args__ = (
        Index(None, "campaign_id", "seq"),
        Index(
            "ix_events_unsequenced",
            "id",
            sqlite_where=text("seq IS NULL"),
            postgresql_where=text("seq IS NULL"),
        ),
    )

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True
    )
    seq: Mapped[int | None] = mapped_column(BigInteger, unique=True)
    """Its place in the order that readers see, given once it is committed; None: not yet given."""
    campaign_id: Mapped[int]
    trial_id: Mapped[int | None]
    kind: Mapped[str] = mapped_column(String(40))
    at: Mapped[datetime]
    data: Mapped[dict[str, Any]]


class EventCounter(Base):
    """The last place that was given; it never goes back, whatever is deleted."""

    __tablename__ = "event_counter"
    __table_args__ = (CheckConstraint("id = 1", name="is_one"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    last_seq: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    pruned_seq: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    """The last number among the events that are kept no more."""

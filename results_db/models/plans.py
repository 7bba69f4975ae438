"""The table of plans that the driver makes."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import CheckConstraint, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from results_db.models.base import Base, one_of
from results_db.records import PLAN_STATES


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

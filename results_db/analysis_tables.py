"""The tables of a campaign's analysis: which knobs matter, and what one step in each would do."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import CheckConstraint, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column, relationship

from results_db.base import Base, one_of
from results_db.records import STEP_DIRECTIONS, STEP_SOURCES, STEP_STATES


class AnalysisRow(Base):
    """The youngest analysis of a campaign; an earlier one goes when it is made."""

    __tablename__ = "analyses"

    campaign_id: Mapped[int] = mapped_column(
        ForeignKey("campaigns.id", ondelete="CASCADE"), primary_key=True
    )
    winner_id: Mapped[int] = mapped_column(ForeignKey("trials.id", ondelete="CASCADE"), index=True)
    objective: Mapped[str] = mapped_column(String(40))
    num_trials: Mapped[int]
    """Completed trials that the importances were found from."""
    last_ended_seq: Mapped[int]
    """How far the campaign had come."""
    method: Mapped[str] = mapped_column(String(200))
    """How the importances were found; empty where there are none."""
    computed_at: Mapped[datetime]

    importances: Mapped[list[ImportanceRow]] = relationship(
        lazy="raise", viewonly=True, order_by="ImportanceRow.importance.desc()"
    )
    steps: Mapped[list[StepRow]] = relationship(
        lazy="raise", viewonly=True, order_by="StepRow.knob, StepRow.direction"
    )


class ImportanceRow(Base):
    """The share of the objective's variation over the campaign that a knob accounts for."""

    __tablename__ = "knob_importances"
    __table_args__ = (CheckConstraint("importance >= 0 AND importance <= 1", name="is_a_share"),)

    campaign_id: Mapped[int] = mapped_column(
        ForeignKey("analyses.campaign_id", ondelete="CASCADE"), primary_key=True
    )
    knob: Mapped[str] = mapped_column(String(40), primary_key=True)
    importance: Mapped[float]


class StepRow(Base):
    """What one step in a knob, away from the winner, does to the objective."""

    __tablename__ = "knob_steps"
    __table_args__ = (
        CheckConstraint(one_of("direction", STEP_DIRECTIONS), name="direction"),
        CheckConstraint(one_of("source", STEP_SOURCES), name="source"),
        CheckConstraint(one_of("state", STEP_STATES), name="state"),
        CheckConstraint("(state = 'completed') = (effect IS NOT NULL)", name="ran_or_not"),
        CheckConstraint(
            "source = 'measured' OR (trial_id IS NULL AND is_apart IS NULL)", name="measured"
        ),
    )

    campaign_id: Mapped[int] = mapped_column(
        ForeignKey("analyses.campaign_id", ondelete="CASCADE"), primary_key=True
    )
    knob: Mapped[str] = mapped_column(String(40), primary_key=True)
    direction: Mapped[str] = mapped_column(String(4), primary_key=True)
    value: Mapped[str] = mapped_column(String(40))
    """The winner's value of the knob."""
    stepped_value: Mapped[str] = mapped_column(String(40))
    also: Mapped[str] = mapped_column(String(200))
    """Knobs that had to follow, with commas between them."""
    layout_key: Mapped[str] = mapped_column(String(120))
    source: Mapped[str] = mapped_column(String(10))
    state: Mapped[str] = mapped_column(String(14))
    effect: Mapped[float | None]
    """Relative change of the objective; under 0 is worse."""
    is_apart: Mapped[bool | None]
    """Whether it can be told apart from the winner."""
    trial_id: Mapped[int | None] = mapped_column(
        ForeignKey("trials.id", ondelete="SET NULL"), index=True
    )

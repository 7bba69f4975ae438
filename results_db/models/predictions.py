"""The table of predictions."""

from __future__ import annotations

from sqlalchemy import BigInteger, CheckConstraint, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from results_db.models.base import Base, is_at_least, is_over_zero, one_of
from search_spaces.estimates.prediction import PREDICTION_SOURCES


class PredictionRow(Base):
    """What a search predicted of a trial when it proposed its layout; never changed afterwards."""

    __tablename__ = "predictions"
    __table_args__ = (
        CheckConstraint(is_over_zero("step_time_s"), name="step_time"),
        CheckConstraint(is_at_least(0, "log_step_time_sd", "peak_memory_bytes"), name="figures"),
        CheckConstraint("fit_probability >= 0 AND fit_probability <= 1", name="is_a_probability"),
        CheckConstraint(one_of("source", PREDICTION_SOURCES), name="source"),
    )

    trial_id: Mapped[int] = mapped_column(
        ForeignKey("trials.id", ondelete="CASCADE"), primary_key=True
    )
    step_time_s: Mapped[float]
    log_step_time_sd: Mapped[float]
    peak_memory_bytes: Mapped[int] = mapped_column(BigInteger)
    fit_probability: Mapped[float]
    source: Mapped[str] = mapped_column(String(16))

"""The table that leaderboards are read from: a row a layout, made of all of its runs that count.

Everything in it follows from trials, measurements and iterations. `results_db.standing_upkeep` writes it
in the transaction that changes one of these, so that no page has to rank a campaign.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import CheckConstraint, ForeignKeyConstraint, Index, String, UniqueConstraint, text
from sqlalchemy.orm import Mapped, mapped_column

from results_db.models import Base

STANDINGS_VERSION: Final = 1
"""Of what the rows hold. Raise it with every change of that: an upgrade makes those of campaigns that
were kept by another version anew."""


class StandingRow(Base):
    """A ranked layout of a campaign."""

    __tablename__ = "standings"
    __table_args__ = (
        ForeignKeyConstraint(
            ["trial_id", "campaign_id"], ["trials.id", "trials.campaign_id"], ondelete="CASCADE"
        ),
        UniqueConstraint("campaign_id", "layout_key"),
        CheckConstraint("num_runs > 0 AND step_time_s > 0", name="was_measured"),
        Index(None, "campaign_id", "value"),
        Index(
            "ix_standings_campaign_id_on_front",
            "campaign_id",
            sqlite_where=text("on_front = 1"),
            postgresql_where=text("on_front"),
        ),
        Index(
            "ix_standings_campaign_id_repeated",
            "campaign_id",
            sqlite_where=text("num_runs > 1"),
            postgresql_where=text("num_runs > 1"),
        ),
    )

    trial_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    """The first of the runs that count: what stands for the layout."""
    campaign_id: Mapped[int]
    layout_key: Mapped[str] = mapped_column(String(120))
    num_runs: Mapped[int]
    shortened: Mapped[bool]
    """Whether every run was stopped early."""
    step_time_s: Mapped[float]
    """Median over the runs; what follows is at this step time."""
    value: Mapped[float]
    """The campaign's own objective, which is one of the next five."""
    tokens_per_s_per_device: Mapped[float]
    tokens_per_s: Mapped[float]
    model_tflops_per_device: Mapped[float]
    hardware_tflops_per_device: Mapped[float]
    tokens_per_node_hour: Mapped[float]
    log_step_time_s: Mapped[float]
    """Logarithm of the median step time, from the iterations."""
    iterations_variance: Mapped[float | None]
    """`search_spaces.pooling.PooledRuns.variance`."""
    iterations_dof: Mapped[int]
    runs_squares: Mapped[float]
    """`search_spaces.pooling.squares_of_runs`; 0 for a single run."""
    weighed_1: Mapped[float | None]
    """The campaign's objectives in their order, as its front compares them; None: not measured, or it has
    fewer."""
    weighed_2: Mapped[float | None]
    weighed_3: Mapped[float | None]
    on_front: Mapped[bool]
    """Whether no other layout is at least as good in all of the campaign's objectives, and better in
    one."""

"""The table of leaderboards: one row for each ranked layout of a campaign."""

from __future__ import annotations

from typing import Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKeyConstraint,
    Index,
    String,
    UniqueConstraint,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from results_db.models.base import Base

_LISTING: Final = (
    "campaign_id",
    "value",
    "tokens_per_s_per_device",
    "tokens_per_s",
    "model_tflops_per_device",
    "hardware_tflops_per_device",
    "tokens_per_node_hour",
    "shortened",
    "num_nodes",
    "tp",
    "pp",
    "dp",
    "vpp",
    "micro_batch_size",
    "num_microbatches",
    "zero_stage",
    "zero_replicas",
    "recompute",
    "sequence_parallel",
    "precision",
    "num_devices",
    "global_batch_size",
    "measured_step_time_s",
    "measured_tokens_per_s",
    "measured_tokens_per_s_per_device",
    "measured_model_tflops_per_device",
    "measured_hardware_tflops_per_device",
    "measured_mfu",
    "measured_hfu",
    "measured_peak_memory_bytes",
    "trial_id",
)
"""Columns that filters and orders of a leaderboard read. With all of them in one index, a list of
100,000 layouts is selected from neighbouring pages of the index, without a look at each row.
PostgreSQL allows 32 columns in an index."""

STANDINGS_VERSION: Final = 1
"""Version of the computation of leaderboard rows. Increase it with every change of that
computation: an upgrade rebuilds rows of other versions."""


class LeaderboardRow(Base):
    """A ranked layout of a campaign: a row of the leaderboard table.

    It is computed from all of the layout's runs that count by `results_db.leaderboard.table`, in
    the transaction that changes them, so that no request has to rank a campaign.
    """

    __tablename__ = "standings"
    __table_args__ = (
        ForeignKeyConstraint(
            ["trial_id", "campaign_id"], ["trials.id", "trials.campaign_id"], ondelete="CASCADE"
        ),
        UniqueConstraint("campaign_id", "layout_key"),
        CheckConstraint("num_runs > 0 AND step_time_s > 0", name="was_measured"),
        # With the trial's id, PostgreSQL reads the order without visiting the rows.
        Index(None, "campaign_id", "value", "trial_id"),
        Index("ix_standings_listing", *_LISTING),
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
    """The first of the runs that count."""
    campaign_id: Mapped[int]
    layout_key: Mapped[str] = mapped_column(String(120))
    num_runs: Mapped[int]
    shortened: Mapped[bool]
    """Whether every run was stopped early."""
    step_time_s: Mapped[float]
    """Median of the runs; the next columns are at this step time."""
    value: Mapped[float]
    """The campaign's own objective, one of the next five."""
    tokens_per_s_per_device: Mapped[float]
    tokens_per_s: Mapped[float]
    model_tflops_per_device: Mapped[float]
    hardware_tflops_per_device: Mapped[float]
    tokens_per_node_hour: Mapped[float]
    log_step_time_s: Mapped[float]
    """Logarithm of the median step time, from the iterations."""
    iterations_variance: Mapped[float | None]
    """`search_spaces.statistics.pooling.PooledRuns.variance`."""
    iterations_dof: Mapped[int]
    runs_squares: Mapped[float]
    """`search_spaces.statistics.pooling.squares_of_runs`; 0 for a single run."""
    weighed_1: Mapped[float | None]
    """The campaign's objectives in order, as compared for its front; None: not measured, or the
    campaign has fewer."""
    weighed_2: Mapped[float | None]
    weighed_3: Mapped[float | None]
    on_front: Mapped[bool]
    """Whether no other layout is at least as good in all of the campaign's objectives, and better
    in one."""

    num_nodes: Mapped[int]
    """The layout; it and the next columns are those of the trial, for filters and orders."""
    tp: Mapped[int]
    pp: Mapped[int]
    dp: Mapped[int]
    vpp: Mapped[int]
    micro_batch_size: Mapped[int]
    num_microbatches: Mapped[int]
    zero_stage: Mapped[int]
    zero_replicas: Mapped[int]
    recompute: Mapped[str] = mapped_column(String(16))
    sequence_parallel: Mapped[bool]
    precision: Mapped[str] = mapped_column(String(8))
    num_devices: Mapped[int]
    global_batch_size: Mapped[int]
    measured_step_time_s: Mapped[float]
    """Metrics of the first run alone, not pooled, for filters and orders."""
    measured_tokens_per_s: Mapped[float]
    measured_tokens_per_s_per_device: Mapped[float]
    measured_model_tflops_per_device: Mapped[float]
    measured_hardware_tflops_per_device: Mapped[float]
    measured_mfu: Mapped[float | None]
    measured_hfu: Mapped[float | None]
    measured_peak_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)

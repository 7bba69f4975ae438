"""The tables. Whatever is ranked or filtered has a typed column of its own."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    String,
    Text,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column, relationship

from results_db.allocation_records import ATTEMPT_PHASES
from results_db.base import Base as Base
from results_db.base import UtcDateTime as UtcDateTime
from results_db.base import is_at_least, is_over_zero
from results_db.base import nothing_yet as nothing_yet
from results_db.base import one_of as one_of
from results_db.records import ATTEMPT_ENDINGS, CAMPAIGN_STATES, TRIAL_STATES
from search_spaces.layout import PRECISIONS, RECOMPUTE_MODES, ZERO_STAGES

_COSTS: Final = (
    "node_seconds",
    "iterations_node_seconds",
    "start_node_seconds",
    "idle_node_seconds",
    "lost_node_seconds",
)
_FIGURES: Final = (
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "model_tflops_per_device",
    "hardware_tflops_per_device",
)
_LAYOUT_COUNTS: Final = (
    "num_nodes",
    "tp",
    "pp",
    "dp",
    "vpp",
    "micro_batch_size",
    "num_microbatches",
    "zero_replicas",
)


class Campaign(Base):
    __tablename__ = "campaigns"
    __table_args__ = (
        UniqueConstraint("name"),
        CheckConstraint(one_of("state", CAMPAIGN_STATES), name="state"),
        CheckConstraint(
            "(state IN ('RUNNING', 'PAUSED')) = (ended_at IS NULL)", name="ended_has_a_time"
        ),
        CheckConstraint(
            "(state IN ('RUNNING', 'PAUSED')) = (reason IS NULL)", name="ended_has_a_reason"
        ),
        CheckConstraint("node_seconds >= 0 AND wall_time_s >= 0", name="costs_not_negative"),
        CheckConstraint(
            is_at_least(0, *_COSTS[1:], "allocation_idle_node_seconds"), name="parts_not_negative"
        ),
        CheckConstraint(
            is_at_least(0, "num_legal_layouts", "last_number", "last_ended_seq"), name="counters"
        ),
        CheckConstraint("state = 'RUNNING' OR clock_at IS NULL", name="clock_runs_with_it"),
        Index(None, "state"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(String(40))
    message: Mapped[str] = mapped_column(Text, default="")
    spec: Mapped[dict[str, Any]]
    model_name: Mapped[str] = mapped_column(String(200))
    cluster_name: Mapped[str] = mapped_column(String(200), index=True)
    objective: Mapped[str] = mapped_column(String(40))
    strategy: Mapped[str] = mapped_column(String(40))
    num_legal_layouts: Mapped[int] = mapped_column(BigInteger)
    max_peak_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """The largest peak of a device that is ranked; None: every one is."""
    probe_deadline_s: Mapped[float | None]
    """Longest that one of its probes may take; None: its description does not say."""
    last_number: Mapped[int] = mapped_column(default=0)
    """Number of the campaign's youngest trial."""
    last_ended_seq: Mapped[int] = mapped_column(default=0)
    """Place of the trial that ended last."""
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    node_seconds: Mapped[float] = mapped_column(default=0.0)
    """What its attempts held; the four below are its parts."""
    iterations_node_seconds: Mapped[float] = nothing_yet()
    start_node_seconds: Mapped[float] = nothing_yet()
    idle_node_seconds: Mapped[float] = nothing_yet()
    lost_node_seconds: Mapped[float] = nothing_yet()
    allocation_idle_node_seconds: Mapped[float] = nothing_yet()
    """Its share of what allocations of its cluster held for nobody; not among node_seconds."""
    created_by: Mapped[str] = mapped_column(String(64), server_default="")
    """Name of the token that submitted it; empty: it was made before there were any."""
    notes: Mapped[str] = mapped_column(Text, server_default="")
    """What its users wrote beside it."""
    standings_version: Mapped[int] = mapped_column(server_default="0")
    """`results_db.standing_tables.STANDINGS_VERSION` when its standings were made; 0: they were not."""
    wall_time_s: Mapped[float] = mapped_column(default=0.0)
    """Seconds RUNNING up to clock_at."""
    clock_at: Mapped[datetime | None]
    """When wall_time_s was last brought up to date; None unless RUNNING."""


class Trial(Base):
    __tablename__ = "trials"
    __table_args__ = (
        UniqueConstraint("campaign_id", "number"),
        UniqueConstraint("campaign_id", "layout_key", "repeat_index"),
        UniqueConstraint("campaign_id", "ended_seq"),
        UniqueConstraint("id", "campaign_id"),
        CheckConstraint(one_of("state", TRIAL_STATES), name="state"),
        CheckConstraint(
            "(state IN ('PENDING', 'RUNNING')) = (ended_at IS NULL)", name="ended_has_a_time"
        ),
        CheckConstraint("(ended_at IS NULL) = (ended_seq IS NULL)", name="ended_has_a_place"),
        CheckConstraint(
            "(state IN ('INFEASIBLE', 'FAILED', 'CANCELLED')) = (reason IS NOT NULL)",
            name="reason_goes_with_state",
        ),
        CheckConstraint(
            "(state = 'RUNNING') = (worker_id IS NOT NULL AND lease_expires_at IS NOT NULL)",
            name="running_has_a_lease",
        ),
        CheckConstraint("(repeat_index = 0) = (repeat_of IS NULL)", name="repeat_is_explicit"),
        CheckConstraint("num_devices = tp * pp * dp", name="num_devices"),
        CheckConstraint(
            "global_batch_size = dp * micro_batch_size * num_microbatches",
            name="global_batch_size",
        ),
        CheckConstraint(is_at_least(1, *_LAYOUT_COUNTS), name="layout_counts"),
        CheckConstraint(f"zero_stage IN ({', '.join(map(str, ZERO_STAGES))})", name="zero_stage"),
        CheckConstraint(one_of("recompute", RECOMPUTE_MODES), name="recompute"),
        CheckConstraint(one_of("precision", PRECISIONS), name="precision"),
        CheckConstraint(
            "number >= 1 AND " + is_at_least(0, "repeat_index", "lost_attempts", "iterations_done"),
            name="counters",
        ),
        CheckConstraint("lost_attempts <= attempt", name="lost_attempts"),
        CheckConstraint("state <> 'RUNNING' OR attempt >= 1", name="running_is_an_attempt"),
        CheckConstraint("repeat_of <> id", name="repeats_another"),
        CheckConstraint(is_at_least(0, *_COSTS), name="costs_not_negative"),
        Index(None, "campaign_id", "state"),
        Index(None, "state", "id"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    campaign_id: Mapped[int] = mapped_column(ForeignKey("campaigns.id", ondelete="CASCADE"))
    number: Mapped[int]
    layout_key: Mapped[str] = mapped_column(String(120))
    repeat_index: Mapped[int] = mapped_column(default=0)
    repeat_of: Mapped[int | None] = mapped_column(
        ForeignKey("trials.id", ondelete="CASCADE"), index=True
    )

    num_nodes: Mapped[int]
    tp: Mapped[int]
    pp: Mapped[int]
    dp: Mapped[int]
    vpp: Mapped[int]
    micro_batch_size: Mapped[int]
    num_microbatches: Mapped[int]
    zero_stage: Mapped[int]
    zero_replicas: Mapped[int] = mapped_column(server_default="1")
    recompute: Mapped[str] = mapped_column(String(16))
    sequence_parallel: Mapped[bool]
    precision: Mapped[str] = mapped_column(String(8))
    num_devices: Mapped[int]
    global_batch_size: Mapped[int]

    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(String(40))
    message: Mapped[str] = mapped_column(Text, default="")
    node: Mapped[str] = mapped_column(String(255), default="")
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    """Its worker is to be told to stop, and it is not to be tried again."""
    attempt: Mapped[int] = mapped_column(default=0)
    lost_attempts: Mapped[int] = mapped_column(default=0)
    iterations_done: Mapped[int] = mapped_column(default=0)
    worker_id: Mapped[str | None] = mapped_column(ForeignKey("workers.id"), index=True)
    lease_expires_at: Mapped[datetime | None]
    node_seconds: Mapped[float] = mapped_column(default=0.0)
    iterations_node_seconds: Mapped[float] = nothing_yet()
    start_node_seconds: Mapped[float] = nothing_yet()
    idle_node_seconds: Mapped[float] = nothing_yet()
    lost_node_seconds: Mapped[float] = nothing_yet()
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    ended_seq: Mapped[int | None]

    measurement: Mapped[MeasurementRow | None] = relationship(lazy="raise", viewonly=True)


class Attempt(Base):
    """One lease of a trial."""

    __tablename__ = "attempts"
    __table_args__ = (
        CheckConstraint(one_of("ending", ATTEMPT_ENDINGS), name="ending"),
        CheckConstraint("(ending IS NULL) = (ended_at IS NULL)", name="ended_has_an_ending"),
        CheckConstraint("attempt >= 1", name="counts_from_one"),
        CheckConstraint(one_of("phase", ATTEMPT_PHASES), name="phase"),
        CheckConstraint(is_at_least(0, "held_s", "nodes_held", "iterations_s"), name="times"),
        CheckConstraint(is_at_least(0, *_COSTS), name="costs_not_negative"),
        # A trial is in one attempt at a time.
        Index(
            "uq_attempts_trial_id_open",
            "trial_id",
            unique=True,
            sqlite_where=text("ending IS NULL"),
            postgresql_where=text("ending IS NULL"),
        ),
    )

    trial_id: Mapped[int] = mapped_column(
        ForeignKey("trials.id", ondelete="CASCADE"), primary_key=True
    )
    attempt: Mapped[int] = mapped_column(primary_key=True)
    worker_id: Mapped[str] = mapped_column(ForeignKey("workers.id"), index=True)
    started_at: Mapped[datetime]
    seen_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    ending: Mapped[str | None] = mapped_column(String(16))
    node_seconds: Mapped[float] = mapped_column(default=0.0)
    iterations_node_seconds: Mapped[float] = nothing_yet()
    start_node_seconds: Mapped[float] = nothing_yet()
    idle_node_seconds: Mapped[float] = nothing_yet()
    lost_node_seconds: Mapped[float] = nothing_yet()
    phase: Mapped[str | None] = mapped_column(String(16))
    """What its worker said last that it does with the trial; None: it did not say."""
    held_s: Mapped[float | None]
    """Seconds that it has held its nodes, as its worker said last; None: it did not say."""
    nodes_held: Mapped[float | None]
    """Nodes that it holds, a part of one included; None: those of its layout."""
    iterations_s: Mapped[float | None]
    """Seconds of its iterations; None: its worker did not say."""
    waiting_because: Mapped[str] = mapped_column(Text, server_default="")
    """Its worker's words while it waits for devices."""


class MeasurementRow(Base):
    """What a probe measured; what an imported table does not tell is NULL, and nothing else is."""

    __tablename__ = "measurements"
    __table_args__ = (
        ForeignKeyConstraint(
            ["trial_id", "campaign_id"], ["trials.id", "trials.campaign_id"], ondelete="CASCADE"
        ),
        CheckConstraint(is_over_zero(*_FIGURES), name="figures"),
        CheckConstraint("tokens_per_step >= 1 AND peak_memory_bytes >= 0", name="counts"),
        Index(None, "campaign_id", "peak_memory_bytes"),
        Index(None, "campaign_id", "kin"),
    )

    trial_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    campaign_id: Mapped[int]
    """The trial's; here too, so that one index finds a campaign's measurements, by their peaks."""
    step_time_s: Mapped[float]
    step_time_q25_s: Mapped[float | None]
    step_time_q75_s: Mapped[float | None]
    tokens_per_step: Mapped[int] = mapped_column(BigInteger)
    tokens_per_s: Mapped[float]
    tokens_per_s_per_device: Mapped[float]
    model_tflops_per_device: Mapped[float]
    hardware_tflops_per_device: Mapped[float]
    peak_tflops_per_device: Mapped[float | None]
    peak_source: Mapped[str | None] = mapped_column(String(200))
    mfu: Mapped[float | None]
    hfu: Mapped[float | None]
    peak_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    memory_kind: Mapped[str | None] = mapped_column(String(40))
    oversubscribed: Mapped[bool]
    warmup_settled: Mapped[bool | None]
    kin: Mapped[int | None]
    """The earliest trial of the same batch and precision with the same losses, itself included; None
    until they are compared."""
    skipped_steps: Mapped[int | None]
    shortened: Mapped[bool] = mapped_column(server_default=false())
    iterations_asked: Mapped[int | None]

    stages: Mapped[list[StageMemory]] = relationship(
        lazy="raise", viewonly=True, order_by="StageMemory.stage"
    )
    breakdown: Mapped[BreakdownRow | None] = relationship(lazy="raise", viewonly=True)


class BreakdownRow(Base):
    """Where the time of a measured iteration went; those of the first schema have none."""

    __tablename__ = "breakdowns"

    trial_id: Mapped[int] = mapped_column(
        ForeignKey("measurements.trial_id", ondelete="CASCADE"), primary_key=True
    )
    compute_s: Mapped[float]
    tp_s: Mapped[float]
    pp_s: Mapped[float]
    dp_s: Mapped[float]
    optimizer_s: Mapped[float]
    unexplained_s: Mapped[float]


class StageMemory(Base):
    """The largest peak of any rank of one pipeline stage."""

    __tablename__ = "stage_memories"

    trial_id: Mapped[int] = mapped_column(
        ForeignKey("measurements.trial_id", ondelete="CASCADE"), primary_key=True
    )
    stage: Mapped[int] = mapped_column(primary_key=True)
    peak_memory_bytes: Mapped[int] = mapped_column(BigInteger)
    peak_reserved_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """What the device's allocator held at most; None on the CPU."""


class IterationRow(Base):
    __tablename__ = "iterations"
    __table_args__ = (CheckConstraint(one_of("kind", ("warmup", "timed")), name="kind"),)

    trial_id: Mapped[int] = mapped_column(
        ForeignKey("measurements.trial_id", ondelete="CASCADE"), primary_key=True
    )
    index: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(8))
    step_time_s: Mapped[float]
    loss: Mapped[float]
    grad_norm: Mapped[float | None]


class EnvironmentRow(Base):
    """What the attempt that ended a trial ran on."""

    __tablename__ = "environments"

    trial_id: Mapped[int] = mapped_column(
        ForeignKey("trials.id", ondelete="CASCADE"), primary_key=True
    )
    host: Mapped[str] = mapped_column(String(255))
    device: Mapped[str] = mapped_column(String(255))
    backend: Mapped[str] = mapped_column(String(40))
    python_version: Mapped[str] = mapped_column(String(80))
    torch_version: Mapped[str] = mapped_column(String(80))
    numpy_version: Mapped[str] = mapped_column(String(80))
    git_revision: Mapped[str] = mapped_column(String(80))


class TrialLog(Base):
    """The last lines that a trial's ranks printed; apart, since lists of trials never read them."""

    __tablename__ = "trial_logs"

    trial_id: Mapped[int] = mapped_column(
        ForeignKey("trials.id", ondelete="CASCADE"), primary_key=True
    )
    tail: Mapped[str] = mapped_column(Text)

"""Tables of campaigns, trials, measurements, analyses and imports.

Every value that is ranked or filtered has a typed column. A column without a description is the
field of its name in a record of `results_db.records`; `plain_columns` makes those of a dataclass.
"""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import (
    JSON,
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

from layout_tuner.predictions.estimates.prediction import PREDICTION_SOURCES
from layout_tuner.protocol.measurement import Breakdown, Environment, Measurement
from layout_tuner.protocol.states import ATTEMPT_PHASES, TRIAL_STATES
from layout_tuner.results_db.models.plain_columns import plain_columns
from layout_tuner.results_db.models.table_base import (
    Base,
    StoredDocument,
    StoredSettings,
    index_where,
    is_at_least,
    is_over_zero,
    one_of,
    part_of,
    sum_column,
)
from layout_tuner.results_db.records import (
    ATTEMPT_ENDINGS,
    CAMPAIGN_STATES,
    REPEAT_REASONS,
    STEP_DIRECTIONS,
    STEP_SOURCES,
    STEP_STATES,
    VISIBILITIES,
    Cost,
    MeasurementRecord,
)
from layout_tuner.search_spaces.campaigns.stored_campaign import StoredCampaign
from layout_tuner.search_spaces.layouts.job_settings import JobSettings
from layout_tuner.search_spaces.layouts.layout import COUNT_KNOBS, DEGREES, KNOBS
from layout_tuner.search_spaces.layouts.pipeline_layout import MAX_TEXT, SPLIT
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER

_LATER_COUNTS: Final = ("tp_columns", "ep", "etp")
"""Counts with a check of their own each; `layout_counts` checks the others."""
_LAYOUT_KEY: Final = String(120).with_variant(String(1000), "postgresql")
"""The longest is that of a cheap probe of a job with settings: under 600 characters and those of
`MAX_KEY_LENGTH`. SQLite checks no lengths."""
_KNOB: Final = String(40).with_variant(String(64), "postgresql")
"""The name of a knob of a layout or a job."""
_KNOB_VALUE: Final = String(40).with_variant(String(MAX_TEXT), "postgresql")
"""A value of one: the longest is the text of `pipeline_layout`."""
_COSTS: Final = ("node_seconds", *(f"{part.name}_node_seconds" for part in fields(Cost)))

_FIGURES: Final = (
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "model_tflops_per_device",
    "hardware_tflops_per_device",
)


class WithCosts:
    """A table with costs of attempts."""

    node_seconds: Mapped[float] = mapped_column(default=0.0)
    """Node-seconds of its attempts; the next four are the parts."""
    iterations_node_seconds: Mapped[float] = sum_column()
    start_node_seconds: Mapped[float] = sum_column()
    idle_node_seconds: Mapped[float] = sum_column()
    lost_node_seconds: Mapped[float] = sum_column()


class Campaign(WithCosts, Base):
    __tablename__ = "campaigns"
    __table_args__ = (
        UniqueConstraint("created_by", "name"),
        # Owners do not learn the names of campaigns that they may not see: those may be alike.
        index_where("uq_campaigns_name_everyone", "name", "visibility = 'everyone'"),
        Index(None, "name"),
        CheckConstraint(one_of("state", CAMPAIGN_STATES), name="state"),
        CheckConstraint(one_of("visibility", VISIBILITIES), name="visibility"),
        CheckConstraint("visibility <> 'group' OR group_name IS NOT NULL", name="group_has_a_name"),
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
    spec: Mapped[dict[str, Any]] = mapped_column(StoredDocument)
    model_name: Mapped[str] = mapped_column(String(200))
    cluster_name: Mapped[str] = mapped_column(String(200), index=True)
    trainer: Mapped[str] = mapped_column(
        String(64), default=EMBEDDED_TRAINER, server_default=EMBEDDED_TRAINER
    )
    objective: Mapped[str] = mapped_column(String(40))
    strategy: Mapped[str] = mapped_column(String(40))
    num_legal_layouts: Mapped[int] = mapped_column(BigInteger)
    max_peak_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    probe_deadline_s: Mapped[float | None]
    """Longest duration of a probe; None: its description has none."""
    last_number: Mapped[int] = mapped_column(default=0)
    """Number of the campaign's newest trial."""
    last_ended_seq: Mapped[int] = mapped_column(default=0)
    """`ended_seq` of the trial that ended last."""
    to_beat: Mapped[float | list[list[float | None]] | None] = mapped_column(
        JSON(none_as_null=True)
    )
    """What its probes must beat to run in full: with one objective the low end of the winner's
    interval, with several the objectives of the layouts on the Pareto front, each as of the last
    run that could change it (`trials/to_beat.py`). None: nothing."""
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    allocation_idle_node_seconds: Mapped[float] = sum_column()
    """Its share of idle allocations of its cluster; not included in node_seconds."""
    created_by: Mapped[str] = mapped_column(String(64), server_default="")
    visibility: Mapped[str] = mapped_column(
        String(8), default="everyone", server_default="everyone"
    )
    group: Mapped[str | None] = mapped_column("group_name", String(64))
    priority: Mapped[int] = mapped_column(default=0, server_default="0")
    notes: Mapped[str] = mapped_column(Text, server_default="")
    waiting_because: Mapped[str] = mapped_column(Text, server_default="")
    host_failures: Mapped[int] = mapped_column(default=0, server_default="0")
    """Trials that failed because a host lacks a resource, since it was last resumed."""
    wall_time_s: Mapped[float] = mapped_column(default=0.0)
    """Seconds in state RUNNING, while a worker could serve it, up to clock_at."""
    clock_at: Mapped[datetime | None]
    """Time of the last update of wall_time_s; None while it stands."""

    @property
    def stored(self) -> StoredCampaign:
        """Its description, which is read anew each time that this is asked for."""
        return StoredCampaign(document=self.spec)


class Trial(WithCosts, Base):
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
        CheckConstraint(f"num_devices = {' * '.join(DEGREES)}", name="num_devices"),
        CheckConstraint(
            "global_batch_size = dp * micro_batch_size * num_microbatches", name="global_batch_size"
        ),
        CheckConstraint(
            is_at_least(1, *(name for name in COUNT_KNOBS if name not in _LATER_COUNTS)),
            name="layout_counts",
        ),
        *(CheckConstraint(is_at_least(1, name), name=name) for name in _LATER_COUNTS),
        *(
            CheckConstraint(one_of(name, knob.choices), name=name)
            for name, knob in KNOBS.items()
            if knob.choices and not knob.is_switch and not knob.is_text
        ),
        CheckConstraint(
            "number >= 1 AND " + is_at_least(0, "repeat_index", "lost_attempts", "iterations_done"),
            name="counters",
        ),
        CheckConstraint("lost_attempts <= attempt", name="lost_attempts"),
        CheckConstraint("state <> 'RUNNING' OR attempt >= 1", name="running_is_an_attempt"),
        CheckConstraint("repeat_of <> id", name="repeats_another"),
        CheckConstraint(one_of("repeat_reason", REPEAT_REASONS), name="repeat_reason"),
        CheckConstraint(is_at_least(0, *_COSTS), name="costs_not_negative"),
        Index(None, "campaign_id", "state"),
        Index(None, "state", "id"),
        index_where(
            "ix_trials_campaign_id_job", ("campaign_id", "job"), "job IS NOT NULL", unique=False
        ),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    campaign_id: Mapped[int] = mapped_column(ForeignKey("campaigns.id", ondelete="CASCADE"))
    number: Mapped[int]
    layout_key: Mapped[str] = mapped_column(_LAYOUT_KEY)
    repeat_index: Mapped[int] = mapped_column(default=0)
    repeat_of: Mapped[int | None] = mapped_column(
        ForeignKey("trials.id", ondelete="CASCADE"), index=True
    )
    repeat_reason: Mapped[str | None] = mapped_column(String(16))
    """None: it repeats none, or was stored before reasons were."""
    is_baseline: Mapped[bool] = mapped_column(default=False, server_default=false())

    # The knobs. A column also has a length, and a default for rows of releases without the knob; a
    # test holds the columns to `KNOBS`.
    num_nodes: Mapped[int]
    tp: Mapped[int]
    tp_columns: Mapped[int] = mapped_column(server_default=text("1"))
    cp: Mapped[int] = mapped_column(server_default=text("1"))
    pp: Mapped[int]
    dp: Mapped[int]
    ep: Mapped[int] = mapped_column(server_default=text("1"))
    etp: Mapped[int] = mapped_column(server_default=text("1"))
    vpp: Mapped[int]
    schedule: Mapped[str] = mapped_column(String(16), server_default="1f1b")
    cp_comm_type: Mapped[str] = mapped_column(String(16), server_default="all_gather")
    pipeline_split: Mapped[str] = mapped_column(String(24), server_default="layers")
    pipeline_layout: Mapped[str] = mapped_column(String(MAX_TEXT), server_default=SPLIT)
    rank_order: Mapped[str] = mapped_column(String(16), server_default="tp_cp_dp_pp")
    micro_batch_size: Mapped[int]
    num_microbatches: Mapped[int]
    zero_stage: Mapped[int]
    zero_replicas: Mapped[int] = mapped_column(server_default="1")
    recompute: Mapped[str] = mapped_column(String(64))
    recompute_layers: Mapped[str] = mapped_column(String(64), server_default="all")
    offload: Mapped[str] = mapped_column(String(16), server_default="none")
    optimizer_states: Mapped[str] = mapped_column(String(8), server_default="fp32")
    sequence_parallel: Mapped[bool]
    precision: Mapped[str] = mapped_column(String(16))
    num_devices: Mapped[int]
    global_batch_size: Mapped[int]
    job: Mapped[JobSettings] = mapped_column(StoredSettings, nullable=True)

    full_num_nodes: Mapped[int | None]
    """Of a cheap probe, the nodes of the layout that it stands for; None, as in the next three:
    the trial runs its layout in full."""
    full_dp: Mapped[int | None]
    full_num_microbatches: Mapped[int | None]
    num_layers: Mapped[int | None]

    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str | None] = mapped_column(String(40))
    message: Mapped[str] = mapped_column(Text, default="")
    node: Mapped[str] = mapped_column(String(255), default="")
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    """Whether its worker must stop it; it is not tried again."""
    attempt: Mapped[int] = mapped_column(default=0)
    lost_attempts: Mapped[int] = mapped_column(default=0)
    iterations_done: Mapped[int] = mapped_column(default=0)
    worker_id: Mapped[str | None] = mapped_column(ForeignKey("workers.id"), index=True)
    lease_expires_at: Mapped[datetime | None]
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    ended_at: Mapped[datetime | None]
    ended_seq: Mapped[int | None]

    measurement: Mapped[MeasurementRow | None] = relationship(lazy="raise", viewonly=True)


class Attempt(WithCosts, Base):
    """One lease of a trial."""

    __tablename__ = "attempts"
    __table_args__ = (
        CheckConstraint(one_of("ending", ATTEMPT_ENDINGS), name="ending"),
        CheckConstraint("(ending IS NULL) = (ended_at IS NULL)", name="ended_has_an_ending"),
        CheckConstraint("attempt >= 1", name="counts_from_one"),
        CheckConstraint(one_of("phase", ATTEMPT_PHASES), name="phase"),
        CheckConstraint(is_at_least(0, "held_s", "nodes_held", "iterations_s"), name="times"),
        CheckConstraint(is_at_least(0, *_COSTS), name="costs_not_negative"),
        # A trial has at most one open attempt.
        index_where("uq_attempts_trial_id_open", "trial_id", "ending IS NULL"),
    )

    trial_id: Mapped[int] = part_of("trials.id")
    attempt: Mapped[int] = mapped_column(primary_key=True)
    worker_id: Mapped[str] = mapped_column(ForeignKey("workers.id"), index=True)
    started_at: Mapped[datetime]
    seen_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    ending: Mapped[str | None] = mapped_column(String(16))
    phase: Mapped[str | None] = mapped_column(String(16))
    held_s: Mapped[float | None]
    nodes_held: Mapped[float | None]
    iterations_s: Mapped[float | None]
    waiting_because: Mapped[str] = mapped_column(Text, server_default="")
    outcome_digest: Mapped[str | None] = mapped_column(String(64))
    """SHA-256 of the outcome that it reported: the same one may be posted again."""


class MeasurementRow(Base):
    """The measurement of a trial; only figures that an imported table lacks are NULL.

    Its other columns are the plain fields of `MeasuredFigures`.
    """

    __tablename__ = "measurements"
    __table_args__ = (
        *plain_columns(MeasurementRecord, defaults_of=Measurement),
        ForeignKeyConstraint(
            ["trial_id", "campaign_id"], ["trials.id", "trials.campaign_id"], ondelete="CASCADE"
        ),
        CheckConstraint(is_over_zero(*_FIGURES), name="figures"),
        CheckConstraint("tokens_per_step >= 1 AND peak_memory_bytes >= 0", name="counts"),
        CheckConstraint("others_share >= 0 AND others_share <= 1", name="others_share"),
        Index(None, "campaign_id", "peak_memory_bytes"),
    )

    trial_id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    campaign_id: Mapped[int]
    """The trial's campaign, repeated here for an index on campaign and peak."""
    same_losses_as: Mapped[int | None]
    """The earlier trial of the same batch and precision with the same losses, possibly itself;
    None until it is compared."""
    if TYPE_CHECKING:  # the types of the measured columns that statements name
        step_time_s: Mapped[float]
        tokens_per_s: Mapped[float]
        peak_memory_bytes: Mapped[int | None]
        oversubscribed: Mapped[bool]
        shortened: Mapped[bool]
        tokens: Mapped[str]
        losses_comparable: Mapped[bool]
        others_share: Mapped[float | None]
        throttled: Mapped[bool | None]

    stages: Mapped[list[StageMemoryRow]] = relationship(
        lazy="raise", viewonly=True, order_by="StageMemoryRow.stage"
    )
    breakdown: Mapped[BreakdownRow | None] = relationship(lazy="raise", viewonly=True)


class BreakdownRow(Base):
    """The parts of a measured step time; imported measurements have none."""

    __tablename__ = "breakdowns"
    __table_args__ = (*plain_columns(Breakdown),)

    trial_id: Mapped[int] = part_of("measurements.trial_id")


class StageMemoryRow(Base):
    """The largest peak of any rank of one pipeline stage."""

    __tablename__ = "stage_memories"

    trial_id: Mapped[int] = part_of("measurements.trial_id")
    stage: Mapped[int] = mapped_column(primary_key=True)
    peak_memory_bytes: Mapped[int] = mapped_column(BigInteger)
    peak_reserved_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """Largest memory held by the device's allocator; None on the CPU."""


class IterationRow(Base):
    __tablename__ = "iterations"
    __table_args__ = (CheckConstraint(one_of("kind", ("warmup", "timed")), name="kind"),)

    trial_id: Mapped[int] = part_of("measurements.trial_id")
    index: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(8))
    step_time_s: Mapped[float]
    loss: Mapped[float | None]
    grad_norm: Mapped[float | None]


class EnvironmentRow(Base):
    """The environment of the attempt that ended a trial."""

    __tablename__ = "environments"
    __table_args__ = (*plain_columns(Environment),)

    trial_id: Mapped[int] = part_of("trials.id")


class PredictionRow(Base):
    """What a search predicted of a trial when it proposed its layout; never changed afterwards."""

    __tablename__ = "predictions"
    __table_args__ = (
        CheckConstraint(is_over_zero("step_time_s"), name="step_time"),
        CheckConstraint(is_at_least(0, "log_step_time_sd", "peak_memory_bytes"), name="figures"),
        CheckConstraint("fit_probability >= 0 AND fit_probability <= 1", name="is_a_probability"),
        CheckConstraint(one_of("source", PREDICTION_SOURCES), name="source"),
    )

    trial_id: Mapped[int] = part_of("trials.id")
    step_time_s: Mapped[float]
    log_step_time_sd: Mapped[float]
    peak_memory_bytes: Mapped[int] = mapped_column(BigInteger)
    fit_probability: Mapped[float]
    source: Mapped[str] = mapped_column(String(16))


class TrialLog(Base):
    """The last lines that a trial's ranks printed; lists of trials do not read them."""

    __tablename__ = "trial_logs"

    trial_id: Mapped[int] = part_of("trials.id")
    tail: Mapped[str] = mapped_column(Text)


class AnalysisRow(Base):
    """The newest analysis of a campaign; it replaces an earlier one."""

    __tablename__ = "analyses"

    campaign_id: Mapped[int] = part_of("campaigns.id")
    winner_id: Mapped[int] = mapped_column(ForeignKey("trials.id", ondelete="CASCADE"), index=True)
    objective: Mapped[str] = mapped_column(String(40))
    num_trials: Mapped[int]
    last_ended_seq: Mapped[int]
    method: Mapped[str] = mapped_column(String(200))
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

    campaign_id: Mapped[int] = part_of("analyses.campaign_id")
    knob: Mapped[str] = mapped_column(_KNOB, primary_key=True)
    importance: Mapped[float]


class StepRow(Base):
    """The effect on the objective of one step in a knob, away from the winner."""

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

    campaign_id: Mapped[int] = part_of("analyses.campaign_id")
    knob: Mapped[str] = mapped_column(_KNOB, primary_key=True)
    direction: Mapped[str] = mapped_column(String(4), primary_key=True)
    value: Mapped[str] = mapped_column(_KNOB_VALUE)
    stepped_value: Mapped[str] = mapped_column(_KNOB_VALUE)
    also: Mapped[str] = mapped_column(String(200).with_variant(String(1000), "postgresql"))
    """Knobs that had to change too, separated by commas."""
    layout_key: Mapped[str] = mapped_column(_LAYOUT_KEY)
    source: Mapped[str] = mapped_column(String(10))
    state: Mapped[str] = mapped_column(String(14))
    effect: Mapped[float | None]
    is_apart: Mapped[bool | None]
    trial_id: Mapped[int | None] = mapped_column(
        ForeignKey("trials.id", ondelete="SET NULL"), index=True
    )


class Import(Base):
    """Where an imported campaign comes from."""

    __tablename__ = "imports"

    campaign_id: Mapped[int] = part_of("campaigns.id")
    source: Mapped[str] = mapped_column(String(1000))
    """The source in the rows of its cell; empty: none."""
    aside_columns: Mapped[list[str]] = mapped_column(JSON)
    """Names of the columns that the format does not define, in order."""


class ImportedRow(Base):
    """Values of an imported table besides the layout and the measurement."""

    __tablename__ = "imported_rows"

    trial_id: Mapped[int] = part_of("trials.id")
    number: Mapped[int]
    """Its position in the table, from 1."""
    line: Mapped[int]
    """The line of the file on which it ends."""
    unstated: Mapped[list[str]] = mapped_column(JSON)
    """Columns that the table left empty although the layout needs them."""
    aside: Mapped[dict[str, Any]]
    """Columns that the format does not define, by name."""
    peak_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    """The peak in the table for a row that did not complete."""

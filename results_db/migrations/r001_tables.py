"""The tables that revision r001 creates.

From the first release on these definitions are frozen, whatever becomes of `results_db.models`: a
change of a table is a migration of its own.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa

SCHEMA: Final = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)
_TIME: Final = sa.DateTime(timezone=True)
_COSTS_NOT_NEGATIVE: Final = (
    "node_seconds >= 0 AND iterations_node_seconds >= 0 AND start_node_seconds >= 0 "
    "AND idle_node_seconds >= 0 AND lost_node_seconds >= 0"
)
_FIGURES: Final = (
    "step_time_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "model_tflops_per_device",
    "hardware_tflops_per_device",
)
"""Positive and finite; infinity is over 1e300, and so is a NaN on PostgreSQL."""
_KNOBS: Final[dict[str, sa.types.TypeEngine[Any]]] = {
    **dict.fromkeys(("num_nodes", "tp", "pp", "dp", "vpp"), sa.Integer()),
    **dict.fromkeys(("micro_batch_size", "num_microbatches"), sa.Integer()),
    **dict.fromkeys(("zero_stage", "zero_replicas"), sa.Integer()),
    "recompute": sa.String(16),
    "sequence_parallel": sa.Boolean(),
    "precision": sa.String(8),
    **dict.fromkeys(("num_devices", "global_batch_size"), sa.Integer()),
}
"""The columns of a layout, with their types."""


def _table(name: str, *parts: sa.schema.SchemaItem, **options: Any) -> sa.Table:
    return sa.Table(name, SCHEMA, *parts, **options)


def _column(
    name: str, kind: sa.types.TypeEngine[Any], *rest: Any, **options: Any
) -> sa.Column[Any]:
    """A column that always has a value."""
    return sa.Column(name, kind, *rest, nullable=False, **options)


def _nullable(name: str, kind: sa.types.TypeEngine[Any], *rest: Any) -> sa.Column[Any]:
    return sa.Column(name, kind, *rest)


def _parts_of_cost() -> list[sa.Column[Any]]:
    """What the node-seconds of a row were spent on."""
    parts = ("iterations", "start", "idle", "lost")
    return [_column(f"{part}_node_seconds", sa.Double(), server_default="0") for part in parts]


def _columns(
    kind: sa.types.TypeEngine[Any], *names: str, nullable: bool = False
) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=nullable) for name in names]


def _knobs(**defaults: str) -> list[sa.Column[Any]]:
    """The columns of a layout; the keywords are values where an INSERT has none."""
    return [_column(name, of, server_default=defaults.get(name)) for name, of in _KNOBS.items()]


def _cascade(column: str) -> sa.ForeignKey:
    """A reference of a row that is deleted with the row that it refers to."""
    return sa.ForeignKey(column, ondelete="CASCADE")


def _of_its_campaign() -> sa.ForeignKeyConstraint:
    """A reference to a trial together with its campaign, so that the two cannot disagree."""
    own, referred = ["trial_id", "campaign_id"], ["trials.id", "trials.campaign_id"]
    return sa.ForeignKeyConstraint(own, referred, ondelete="CASCADE")


def _check(name: str, condition: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(condition, name=name)


def _only(condition: str) -> dict[str, Any]:
    """Options of an index over some of the rows."""
    return {f"{kind}_where": sa.text(condition) for kind in ("sqlite", "postgresql")}


# Campaigns

_table(
    "campaigns",
    _column("id", sa.Integer(), primary_key=True),
    _column("name", sa.String(200)),
    _column("state", sa.String(16)),
    _nullable("reason", sa.String(40)),
    _column("message", sa.Text()),
    _column("spec", sa.JSON()),
    *_columns(sa.String(200), "model_name", "cluster_name"),
    _column("trainer", sa.String(64), server_default="embedded"),
    *_columns(sa.String(40), "objective", "strategy"),
    _column("num_legal_layouts", sa.BigInteger()),
    _nullable("max_peak_memory_bytes", sa.BigInteger()),
    _nullable("probe_deadline_s", sa.Double()),
    *_columns(sa.Integer(), "last_number", "last_ended_seq"),
    _column("created_at", _TIME),
    *_columns(_TIME, "started_at", "ended_at", nullable=True),
    _column("node_seconds", sa.Double()),
    *_parts_of_cost(),
    _column("allocation_idle_node_seconds", sa.Double(), server_default="0"),
    _column("created_by", sa.String(64), server_default=""),
    _column("notes", sa.Text(), server_default=""),
    _column("wall_time_s", sa.Double()),
    _nullable("clock_at", _TIME),
    _check("clock_runs_with_it", "state = 'RUNNING' OR clock_at IS NULL"),
    _check("costs_not_negative", "node_seconds >= 0 AND wall_time_s >= 0"),
    _check("counters", "num_legal_layouts >= 0 AND last_number >= 0 AND last_ended_seq >= 0"),
    _check("ended_has_a_reason", "(state IN ('RUNNING', 'PAUSED')) = (reason IS NULL)"),
    _check("ended_has_a_time", "(state IN ('RUNNING', 'PAUSED')) = (ended_at IS NULL)"),
    _check(
        "parts_not_negative",
        "iterations_node_seconds >= 0 AND start_node_seconds >= 0 AND "
        "idle_node_seconds >= 0 AND lost_node_seconds >= 0 AND "
        "allocation_idle_node_seconds >= 0",
    ),
    _check("state", "state IN ('RUNNING', 'PAUSED', 'COMPLETED', 'CANCELLED', 'FAILED')"),
    sa.UniqueConstraint("name"),
    sa.Index(None, "cluster_name"),
    sa.Index(None, "state"),
    sqlite_autoincrement=True,
)
_table(
    "imports",
    _column("campaign_id", sa.Integer(), _cascade("campaigns.id"), primary_key=True),
    _column("source", sa.String(1000)),
    _column("aside_columns", sa.JSON()),
)

# Workers and their nodes

_table(
    "workers",
    _column("id", sa.String(32), primary_key=True),
    _column("name", sa.String(200)),
    _column("host", sa.String(255)),
    _column("cluster", sa.String(200)),
    *_columns(sa.Integer(), "num_nodes", "devices_per_node"),
    _column("device", sa.String(255)),
    _column("versions", sa.JSON()),
    _column("trainers", sa.JSON(), server_default="{}"),
    *_columns(_TIME, "registered_at", "seen_at"),
    _nullable("ended_at", _TIME),
    _column("scheduler", sa.String(16), server_default="none"),
    _nullable("job_id", sa.String(64)),
    _column("launcher", sa.String(40), server_default=""),
    _nullable("ends_at", _TIME),
    _column("shares_nodes", sa.Boolean(), server_default=sa.false()),
    _column("state", sa.String(16), server_default="working"),
    _column("idle_node_seconds", sa.Double(), server_default="0"),
    _column("idle_shared_node_seconds", sa.Double(), server_default="0"),
    _nullable("status_at", _TIME),
    _column("registered_by", sa.String(64), server_default=""),
    _check("costs_not_negative", "idle_node_seconds >= 0"),
    _check("holds_devices", "num_nodes >= 1 AND devices_per_node >= 1"),
    _check("scheduler", "scheduler IN ('slurm', 'none')"),
    _check("state", "state IN ('starting', 'working', 'draining')"),
    sa.Index(None, "cluster", "seen_at"),
    sa.Index("uq_workers_name_live", "name", unique=True, **_only("ended_at IS NULL")),
)
_table(
    "allocation_nodes",
    _column("worker_id", sa.String(32), _cascade("workers.id"), primary_key=True),
    _column("name", sa.String(255), primary_key=True),
    *_columns(sa.Integer(), "position", "num_devices"),
    _column("state", sa.String(16)),
    *_columns(sa.Text(), "doing", "reason"),
    _nullable("free_devices", sa.Integer()),
    _nullable("health", sa.JSON(none_as_null=True)),
    _check(
        "state",
        "state IN ('starting', 'checking', 'idle', 'busy', 'recovering', 'lost', 'quarantined')",
    ),
    sa.Index(None, "name"),
)
_table(
    "node_quarantines",
    _column("cluster", sa.String(200), primary_key=True),
    _column("node", sa.String(255), primary_key=True),
    _column("reason", sa.Text()),
    _column("since", _TIME),
    _column("requested_by_user", sa.Boolean()),
    _nullable("released_at", _TIME),
    _column("release_pending", sa.Boolean()),
    _nullable("release_told_at", _TIME),
)

# Trials

_table(
    "trials",
    _column("id", sa.Integer(), primary_key=True),
    _column("campaign_id", sa.Integer(), _cascade("campaigns.id")),
    _column("number", sa.Integer()),
    _column("layout_key", sa.String(120)),
    _column("repeat_index", sa.Integer()),
    _nullable("repeat_of", sa.Integer(), _cascade("trials.id")),
    _column("is_baseline", sa.Boolean(), server_default=sa.false()),
    *_knobs(zero_replicas="1"),
    *_columns(sa.Integer(), "full_num_nodes", "full_dp", "full_num_microbatches", nullable=True),
    _nullable("num_layers", sa.Integer()),
    _column("state", sa.String(16)),
    _nullable("reason", sa.String(40)),
    _column("message", sa.Text()),
    _column("node", sa.String(255)),
    _column("cancel_requested", sa.Boolean()),
    *_columns(sa.Integer(), "attempt", "lost_attempts", "iterations_done"),
    _nullable("worker_id", sa.String(32), sa.ForeignKey("workers.id")),
    _nullable("lease_expires_at", _TIME),
    _column("node_seconds", sa.Double()),
    *_parts_of_cost(),
    _column("created_at", _TIME),
    *_columns(_TIME, "started_at", "ended_at", nullable=True),
    _nullable("ended_seq", sa.Integer()),
    _check("costs_not_negative", _COSTS_NOT_NEGATIVE),
    _check(
        "counters",
        "number >= 1 AND repeat_index >= 0 AND lost_attempts >= 0 AND iterations_done >= 0",
    ),
    _check("ended_has_a_place", "(ended_at IS NULL) = (ended_seq IS NULL)"),
    _check("ended_has_a_time", "(state IN ('PENDING', 'RUNNING')) = (ended_at IS NULL)"),
    _check("global_batch_size", "global_batch_size = dp * micro_batch_size * num_microbatches"),
    _check(
        "layout_counts",
        "num_nodes >= 1 AND tp >= 1 AND pp >= 1 AND dp >= 1 AND vpp >= 1 AND "
        "micro_batch_size >= 1 AND num_microbatches >= 1 AND zero_replicas >= 1",
    ),
    _check("lost_attempts", "lost_attempts <= attempt"),
    _check("num_devices", "num_devices = tp * pp * dp"),
    _check("precision", "precision IN ('fp32', 'bf16', 'fp16')"),
    _check(
        "reason_goes_with_state",
        "(state IN ('INFEASIBLE', 'FAILED', 'CANCELLED')) = (reason IS NOT NULL)",
    ),
    _check("recompute", "recompute IN ('none', 'selective', 'full')"),
    _check("repeat_is_explicit", "(repeat_index = 0) = (repeat_of IS NULL)"),
    _check("repeats_another", "repeat_of <> id"),
    _check(
        "running_has_a_lease",
        "(state = 'RUNNING') = (worker_id IS NOT NULL AND lease_expires_at IS NOT NULL)",
    ),
    _check("running_is_an_attempt", "state <> 'RUNNING' OR attempt >= 1"),
    _check(
        "state", "state IN ('PENDING', 'RUNNING', 'COMPLETED', 'INFEASIBLE', 'FAILED', 'CANCELLED')"
    ),
    _check("zero_stage", "zero_stage IN (0, 1)"),
    sa.UniqueConstraint("campaign_id", "ended_seq"),
    sa.UniqueConstraint("campaign_id", "layout_key", "repeat_index"),
    sa.UniqueConstraint("campaign_id", "number"),
    sa.UniqueConstraint("id", "campaign_id"),
    sa.Index(None, "campaign_id", "state"),
    sa.Index(None, "repeat_of"),
    sa.Index(None, "state", "id"),
    sa.Index(None, "worker_id"),
    sqlite_autoincrement=True,
)
_table(
    "attempts",
    _column("trial_id", sa.Integer(), _cascade("trials.id"), primary_key=True),
    _column("attempt", sa.Integer(), primary_key=True),
    _column("worker_id", sa.String(32), sa.ForeignKey("workers.id")),
    *_columns(_TIME, "started_at", "seen_at"),
    _nullable("ended_at", _TIME),
    _nullable("ending", sa.String(16)),
    _column("node_seconds", sa.Double()),
    *_parts_of_cost(),
    _nullable("phase", sa.String(16)),
    *_columns(sa.Double(), "held_s", "nodes_held", "iterations_s", nullable=True),
    _column("waiting_because", sa.Text(), server_default=""),
    _nullable("outcome_digest", sa.String(64)),
    _check("costs_not_negative", _COSTS_NOT_NEGATIVE),
    _check("counts_from_one", "attempt >= 1"),
    _check("ended_has_an_ending", "(ending IS NULL) = (ended_at IS NULL)"),
    _check("ending", "ending IN ('reported', 'lost', 'returned', 'superseded')"),
    _check("phase", "phase IN ('waiting', 'starting', 'iterating', 'ending')"),
    _check("times", "held_s >= 0 AND nodes_held >= 0 AND iterations_s >= 0"),
    sa.Index(None, "worker_id"),
    sa.Index("uq_attempts_trial_id_open", "trial_id", unique=True, **_only("ending IS NULL")),
)
_table(
    "environments",
    _column("trial_id", sa.Integer(), _cascade("trials.id"), primary_key=True),
    *_columns(sa.String(255), "host", "device"),
    _column("backend", sa.String(40)),
    *_columns(sa.String(80), "python_version", "torch_version", "numpy_version", "git_revision"),
)
_table(
    "trial_logs",
    _column("trial_id", sa.Integer(), _cascade("trials.id"), primary_key=True),
    _column("tail", sa.Text()),
)
_table(
    "imported_rows",
    _column("trial_id", sa.Integer(), _cascade("trials.id"), primary_key=True),
    *_columns(sa.Integer(), "number", "line"),
    *_columns(sa.JSON(), "unstated", "aside"),
    _nullable("peak_memory_bytes", sa.BigInteger()),
)

# Measurements

_table(
    "measurements",
    _column("trial_id", sa.Integer(), primary_key=True, autoincrement=False),
    _column("campaign_id", sa.Integer()),
    _column("step_time_s", sa.Double()),
    *_columns(sa.Double(), "step_time_q25_s", "step_time_q75_s", nullable=True),
    _column("tokens_per_step", sa.BigInteger()),
    *_columns(sa.Double(), "tokens_per_s", "tokens_per_s_per_device", "model_tflops_per_device"),
    _column("hardware_tflops_per_device", sa.Double()),
    _nullable("peak_tflops_per_device", sa.Double()),
    _nullable("peak_source", sa.String(200)),
    *_columns(sa.Double(), "mfu", "hfu", nullable=True),
    _nullable("peak_memory_bytes", sa.BigInteger()),
    _nullable("memory_kind", sa.String(40)),
    _column("oversubscribed", sa.Boolean()),
    _nullable("warmup_settled", sa.Boolean()),
    *_columns(sa.Integer(), "same_losses_as", "skipped_steps", nullable=True),
    _column("shortened", sa.Boolean(), server_default=sa.false()),
    _nullable("iterations_asked", sa.Integer()),
    _column("trainer", sa.String(64), server_default="embedded"),
    _column("trainer_version", sa.String(64), server_default=""),
    _column("tokens", sa.String(16), server_default="counted"),
    _column("losses_comparable", sa.Boolean(), server_default=sa.true()),
    _check("counts", "tokens_per_step >= 1 AND peak_memory_bytes >= 0"),
    _check("figures", " AND ".join(f"{name} > 0 AND {name} < 1e300" for name in _FIGURES)),
    _of_its_campaign(),
    sa.Index(None, "campaign_id", "peak_memory_bytes"),
)
_table(
    "breakdowns",
    _column("trial_id", sa.Integer(), _cascade("measurements.trial_id"), primary_key=True),
    *_columns(sa.Double(), "compute_s", "tp_s", "pp_s", "dp_s", "optimizer_s", "unexplained_s"),
)
_table(
    "stage_memories",
    _column("trial_id", sa.Integer(), _cascade("measurements.trial_id"), primary_key=True),
    _column("stage", sa.Integer(), primary_key=True),
    _column("peak_memory_bytes", sa.BigInteger()),
    _nullable("peak_reserved_bytes", sa.BigInteger()),
)

_table(
    "iterations",
    _column("trial_id", sa.Integer(), _cascade("measurements.trial_id"), primary_key=True),
    _column("index", sa.Integer(), primary_key=True),
    _column("kind", sa.String(8)),
    _column("step_time_s", sa.Double()),
    *_columns(sa.Double(), "loss", "grad_norm", nullable=True),
    _check("kind", "kind IN ('warmup', 'timed')"),
)
_table(
    "predictions",
    _column("trial_id", sa.Integer(), _cascade("trials.id"), primary_key=True),
    *_columns(sa.Double(), "step_time_s", "log_step_time_sd"),
    _column("peak_memory_bytes", sa.BigInteger()),
    _column("fit_probability", sa.Double()),
    _column("source", sa.String(16)),
    _check("figures", "log_step_time_sd >= 0 AND peak_memory_bytes >= 0"),
    _check("is_a_probability", "fit_probability >= 0 AND fit_probability <= 1"),
    _check("source", "source IN ('estimates', 'calibrated')"),
    _check("step_time", "step_time_s > 0 AND step_time_s < 1e300"),
)

# What follows from measurements

_table(
    "analyses",
    _column("campaign_id", sa.Integer(), _cascade("campaigns.id"), primary_key=True),
    _column("winner_id", sa.Integer(), _cascade("trials.id")),
    _column("objective", sa.String(40)),
    *_columns(sa.Integer(), "num_trials", "last_ended_seq"),
    _column("method", sa.String(200)),
    _column("computed_at", _TIME),
    sa.Index(None, "winner_id"),
)
_table(
    "knob_importances",
    _column("campaign_id", sa.Integer(), _cascade("analyses.campaign_id"), primary_key=True),
    _column("knob", sa.String(40), primary_key=True),
    _column("importance", sa.Double()),
    _check("is_a_share", "importance >= 0 AND importance <= 1"),
)
_table(
    "knob_steps",
    _column("campaign_id", sa.Integer(), _cascade("analyses.campaign_id"), primary_key=True),
    _column("knob", sa.String(40), primary_key=True),
    _column("direction", sa.String(4), primary_key=True),
    *_columns(sa.String(40), "value", "stepped_value"),
    _column("also", sa.String(200)),
    _column("layout_key", sa.String(120)),
    _column("source", sa.String(10)),
    _column("state", sa.String(14)),
    _nullable("effect", sa.Double()),
    _nullable("is_apart", sa.Boolean()),
    _nullable("trial_id", sa.Integer(), sa.ForeignKey("trials.id", ondelete="SET NULL")),
    _check("direction", "direction IN ('down', 'up')"),
    _check("measured", "source = 'measured' OR (trial_id IS NULL AND is_apart IS NULL)"),
    _check("ran_or_not", "(state = 'completed') = (effect IS NOT NULL)"),
    _check("source", "source IN ('measured', 'predicted')"),
    _check("state", "state IN ('completed', 'out_of_memory', 'failed')"),
    sa.Index(None, "trial_id"),
)

# Access

_table(
    "tokens",
    _column("id", sa.Integer(), primary_key=True),
    _column("name", sa.String(64)),
    _column("role", sa.String(16)),
    _column("secret_hash", sa.String(64)),
    _column("created_at", _TIME),
    _column("created_by", sa.String(64)),
    *_columns(_TIME, "expires_at", "revoked_at", "last_used_at", nullable=True),
    _check("is_hashed", "length(secret_hash) = 64"),
    _check("role", "role IN ('viewer', 'submitter', 'admin', 'worker')"),
    sa.UniqueConstraint("secret_hash"),
    sa.Index("uq_tokens_name_live", "name", unique=True, **_only("revoked_at IS NULL")),
)
_table(
    "browser_sign_ins",
    _column("secret_hash", sa.String(64), primary_key=True),
    _column("kind", sa.String(8)),
    _column("token_hash", sa.String(64)),
    *_columns(_TIME, "created_at", "expires_at"),
    _check("is_hashed", "length(secret_hash) = 64"),
    _check("kind", "kind IN ('code', 'session')"),
    sa.Index(None, "expires_at"),
    sa.Index(None, "token_hash", "kind", "expires_at"),
)
_table(
    "audit",
    _column("id", sa.Integer(), primary_key=True),
    _column("at", _TIME),
    _column("actor", sa.String(64)),
    _column("role", sa.String(16)),
    _nullable("token_id", sa.Integer(), sa.ForeignKey("tokens.id")),
    _column("address", sa.String(64)),
    _column("action", sa.String(40)),
    _column("target_kind", sa.String(20)),
    _column("target", sa.String(255)),
    _column("details", sa.JSON()),
    sa.Index(None, "actor", "id"),
    sa.Index(None, "at"),
    sa.Index(None, "target_kind", "target", "id"),
)
_table(
    "idempotency_keys",
    _column("actor", sa.String(64), primary_key=True),
    _column("key", sa.String(255), primary_key=True),
    _column("request_hash", sa.String(64)),
    _column("campaign_id", sa.Integer(), _cascade("campaigns.id")),
    _column("created_at", _TIME),
    sa.Index(None, "campaign_id"),
    sa.Index(None, "created_at"),
)
_table(
    "plans",
    _column("id", sa.Integer(), primary_key=True),
    _column("state", sa.String(8)),
    _column("created_by", sa.String(64)),
    _column("created_at", _TIME),
    _nullable("ended_at", _TIME),
    *_columns(sa.JSON(), "spec", "options", "answer"),
    _column("problem", sa.Text()),
    _check("end", "(state = 'WAITING') = (ended_at IS NULL)"),
    _check("state", "state IN ('WAITING', 'DONE', 'FAILED')"),
    sa.Index(None, "state", "id"),
    sqlite_autoincrement=True,
)
for _name in ("user_models", "user_clusters"):
    _table(
        _name,
        _column("name", sa.String(64), primary_key=True),
        _column("description", sa.JSON()),
        _column("notes", sa.Text(), server_default=""),
        _column("created_by", sa.String(64)),
        *_columns(_TIME, "created_at", "updated_at"),
    )

# What the service's processes share

_table(
    "events",
    _column(
        "id",
        sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
        primary_key=True,
        autoincrement=True,
    ),
    _nullable("seq", sa.BigInteger()),
    _column("campaign_id", sa.Integer()),
    _nullable("trial_id", sa.Integer()),
    _column("kind", sa.String(40)),
    _column("at", _TIME),
    _column("data", sa.JSON()),
    sa.UniqueConstraint("seq"),
    sa.Index(None, "campaign_id", "seq"),
    sa.Index("ix_events_unsequenced", "id", **_only("seq IS NULL")),
)
EVENT_COUNTER: Final = _table(
    "event_counter",
    _column("id", sa.Integer(), primary_key=True, autoincrement=False),
    _column("last_seq", sa.BigInteger(), server_default="0"),
    _column("pruned_seq", sa.BigInteger(), server_default="0"),
    _check("is_one", "id = 1"),
)
DRIVER_LEASE: Final = _table(
    "driver_lease",
    _column("id", sa.Integer(), primary_key=True, autoincrement=False),
    _column("fence", sa.BigInteger()),
    _column("host", sa.String(255)),
    _column("pid", sa.Integer()),
    *_columns(_TIME, "since", "seen_at", "released_at", nullable=True),
    _check("is_one", "id = 1"),
)
SWEEPS: Final = _table(
    "sweeps",
    _column("id", sa.Integer(), primary_key=True, autoincrement=False),
    _nullable("swept_at", _TIME),
    _check("is_one", "id = 1"),
)

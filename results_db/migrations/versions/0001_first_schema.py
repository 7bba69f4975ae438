"""The first schema: campaigns, trials, attempts, measurements, workers.

Revision: 0001, after None.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "campaigns",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=40), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("model_name", sa.String(length=200), nullable=False),
        sa.Column("cluster_name", sa.String(length=200), nullable=False),
        sa.Column("objective", sa.String(length=40), nullable=False),
        sa.Column("strategy", sa.String(length=40), nullable=False),
        sa.Column("num_legal_layouts", sa.BigInteger(), nullable=False),
        sa.Column("last_number", sa.Integer(), nullable=False),
        sa.Column("last_ended_seq", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("node_seconds", sa.Double(), nullable=False),
        sa.Column("wall_time_s", sa.Double(), nullable=False),
        sa.Column("clock_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "(state IN ('RUNNING', 'PAUSED')) = (ended_at IS NULL)",
            name=op.f("ck_campaigns_ended_has_a_time"),
        ),
        sa.CheckConstraint(
            "(state IN ('RUNNING', 'PAUSED')) = (reason IS NULL)",
            name=op.f("ck_campaigns_ended_has_a_reason"),
        ),
        sa.CheckConstraint(
            "state IN ('RUNNING', 'PAUSED', 'COMPLETED', 'CANCELLED', 'FAILED')",
            name=op.f("ck_campaigns_state"),
        ),
        sa.CheckConstraint(
            "node_seconds >= 0 AND wall_time_s >= 0", name=op.f("ck_campaigns_costs_not_negative")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_campaigns")),
        sa.UniqueConstraint("name", name=op.f("uq_campaigns_name")),
    )
    op.create_index(op.f("ix_campaigns_cluster_name"), "campaigns", ["cluster_name"], unique=False)
    op.create_index(op.f("ix_campaigns_state"), "campaigns", ["state"], unique=False)
    op.create_table(
        "driver_beats",
        sa.Column("name", sa.String(length=40), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_driver_beats")),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("cluster", sa.String(length=200), nullable=False),
        sa.Column("num_nodes", sa.Integer(), nullable=False),
        sa.Column("devices_per_node", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(length=255), nullable=False),
        sa.Column("versions", sa.JSON(), nullable=False),
        sa.Column("registered_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "num_nodes >= 1 AND devices_per_node >= 1", name=op.f("ck_workers_holds_devices")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_index(
        op.f("ix_workers_cluster_seen_at"), "workers", ["cluster", "seen_at"], unique=False
    )
    op.create_index(
        "uq_workers_name_live",
        "workers",
        ["name"],
        unique=True,
        sqlite_where=sa.text("ended_at IS NULL"),
        postgresql_where=sa.text("ended_at IS NULL"),
    )
    op.create_table(
        "trials",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("campaign_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("layout_key", sa.String(length=120), nullable=False),
        sa.Column("repeat_index", sa.Integer(), nullable=False),
        sa.Column("repeat_of", sa.Integer(), nullable=True),
        sa.Column("num_nodes", sa.Integer(), nullable=False),
        sa.Column("tp", sa.Integer(), nullable=False),
        sa.Column("pp", sa.Integer(), nullable=False),
        sa.Column("dp", sa.Integer(), nullable=False),
        sa.Column("vpp", sa.Integer(), nullable=False),
        sa.Column("micro_batch_size", sa.Integer(), nullable=False),
        sa.Column("num_microbatches", sa.Integer(), nullable=False),
        sa.Column("zero_stage", sa.Integer(), nullable=False),
        sa.Column("recompute", sa.String(length=16), nullable=False),
        sa.Column("sequence_parallel", sa.Boolean(), nullable=False),
        sa.Column("precision", sa.String(length=8), nullable=False),
        sa.Column("num_devices", sa.Integer(), nullable=False),
        sa.Column("global_batch_size", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.String(length=40), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("node", sa.String(length=255), nullable=False),
        sa.Column("cancel_requested", sa.Boolean(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("lost_attempts", sa.Integer(), nullable=False),
        sa.Column("iterations_done", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.String(length=32), nullable=True),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("node_seconds", sa.Double(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_seq", sa.Integer(), nullable=True),
        sa.CheckConstraint(
            "(state = 'RUNNING') = (worker_id IS NOT NULL AND lease_expires_at IS NOT NULL)",
            name=op.f("ck_trials_running_has_a_lease"),
        ),
        sa.CheckConstraint(
            "(state IN ('INFEASIBLE', 'FAILED', 'CANCELLED')) = (reason IS NOT NULL)",
            name=op.f("ck_trials_reason_goes_with_state"),
        ),
        sa.CheckConstraint(
            "(state IN ('PENDING', 'RUNNING')) = (ended_at IS NULL)",
            name=op.f("ck_trials_ended_has_a_time"),
        ),
        sa.CheckConstraint(
            "state IN ('PENDING', 'RUNNING', 'COMPLETED', 'INFEASIBLE', 'FAILED', 'CANCELLED')",
            name=op.f("ck_trials_state"),
        ),
        sa.CheckConstraint(
            "(ended_at IS NULL) = (ended_seq IS NULL)", name=op.f("ck_trials_ended_has_a_place")
        ),
        sa.CheckConstraint(
            "(repeat_index = 0) = (repeat_of IS NULL)", name=op.f("ck_trials_repeat_is_explicit")
        ),
        sa.CheckConstraint(
            "global_batch_size = dp * micro_batch_size * num_microbatches",
            name=op.f("ck_trials_global_batch_size"),
        ),
        sa.CheckConstraint("num_devices = tp * pp * dp", name=op.f("ck_trials_num_devices")),
        sa.ForeignKeyConstraint(
            ["campaign_id"],
            ["campaigns.id"],
            name=op.f("fk_trials_campaign_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["repeat_of"], ["trials.id"], name=op.f("fk_trials_repeat_of"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], name=op.f("fk_trials_worker_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trials")),
        sa.UniqueConstraint(
            "campaign_id", "ended_seq", name=op.f("uq_trials_campaign_id_ended_seq")
        ),
        sa.UniqueConstraint(
            "campaign_id",
            "layout_key",
            "repeat_index",
            name=op.f("uq_trials_campaign_id_layout_key_repeat_index"),
        ),
        sa.UniqueConstraint("campaign_id", "number", name=op.f("uq_trials_campaign_id_number")),
        sa.UniqueConstraint("id", "campaign_id", name=op.f("uq_trials_id_campaign_id")),
    )
    op.create_index(
        op.f("ix_trials_campaign_id_state"), "trials", ["campaign_id", "state"], unique=False
    )
    op.create_index(op.f("ix_trials_repeat_of"), "trials", ["repeat_of"], unique=False)
    op.create_index(op.f("ix_trials_state_id"), "trials", ["state", "id"], unique=False)
    op.create_index(op.f("ix_trials_worker_id"), "trials", ["worker_id"], unique=False)
    op.create_table(
        "attempts",
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.String(length=32), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ending", sa.String(length=16), nullable=True),
        sa.Column("node_seconds", sa.Double(), nullable=False),
        sa.CheckConstraint(
            "ending IN ('reported', 'lost', 'returned', 'superseded')",
            name=op.f("ck_attempts_ending"),
        ),
        sa.CheckConstraint(
            "(ending IS NULL) = (ended_at IS NULL)", name=op.f("ck_attempts_ended_has_an_ending")
        ),
        sa.ForeignKeyConstraint(
            ["trial_id"], ["trials.id"], name=op.f("fk_attempts_trial_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["worker_id"], ["workers.id"], name=op.f("fk_attempts_worker_id")),
        sa.PrimaryKeyConstraint("trial_id", "attempt", name=op.f("pk_attempts")),
    )
    op.create_index(op.f("ix_attempts_worker_id"), "attempts", ["worker_id"], unique=False)
    op.create_table(
        "environments",
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("device", sa.String(length=255), nullable=False),
        sa.Column("backend", sa.String(length=40), nullable=False),
        sa.Column("python_version", sa.String(length=80), nullable=False),
        sa.Column("torch_version", sa.String(length=80), nullable=False),
        sa.Column("numpy_version", sa.String(length=80), nullable=False),
        sa.Column("git_revision", sa.String(length=80), nullable=False),
        sa.ForeignKeyConstraint(
            ["trial_id"], ["trials.id"], name=op.f("fk_environments_trial_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("trial_id", name=op.f("pk_environments")),
    )
    op.create_table(
        "measurements",
        sa.Column("trial_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("campaign_id", sa.Integer(), nullable=False),
        sa.Column("step_time_s", sa.Double(), nullable=False),
        sa.Column("step_time_q25_s", sa.Double(), nullable=False),
        sa.Column("step_time_q75_s", sa.Double(), nullable=False),
        sa.Column("tokens_per_step", sa.BigInteger(), nullable=False),
        sa.Column("tokens_per_s", sa.Double(), nullable=False),
        sa.Column("tokens_per_s_per_device", sa.Double(), nullable=False),
        sa.Column("model_tflops_per_device", sa.Double(), nullable=False),
        sa.Column("hardware_tflops_per_device", sa.Double(), nullable=False),
        sa.Column("peak_tflops_per_device", sa.Double(), nullable=False),
        sa.Column("peak_source", sa.String(length=200), nullable=False),
        sa.Column("mfu", sa.Double(), nullable=False),
        sa.Column("hfu", sa.Double(), nullable=False),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("memory_kind", sa.String(length=40), nullable=False),
        sa.Column("oversubscribed", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["trial_id", "campaign_id"],
            ["trials.id", "trials.campaign_id"],
            name=op.f("fk_measurements_trial_id_campaign_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("trial_id", name=op.f("pk_measurements")),
    )
    op.create_index(
        op.f("ix_measurements_campaign_id_hardware_tflops_per_device"),
        "measurements",
        ["campaign_id", "hardware_tflops_per_device"],
        unique=False,
    )
    op.create_index(
        op.f("ix_measurements_campaign_id_model_tflops_per_device"),
        "measurements",
        ["campaign_id", "model_tflops_per_device"],
        unique=False,
    )
    op.create_index(
        op.f("ix_measurements_campaign_id_tokens_per_s"),
        "measurements",
        ["campaign_id", "tokens_per_s"],
        unique=False,
    )
    op.create_index(
        op.f("ix_measurements_campaign_id_tokens_per_s_per_device"),
        "measurements",
        ["campaign_id", "tokens_per_s_per_device"],
        unique=False,
    )
    op.create_table(
        "trial_logs",
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("tail", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["trial_id"], ["trials.id"], name=op.f("fk_trial_logs_trial_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("trial_id", name=op.f("pk_trial_logs")),
    )
    op.create_table(
        "iterations",
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=8), nullable=False),
        sa.Column("step_time_s", sa.Double(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=False),
        sa.Column("grad_norm", sa.Double(), nullable=False),
        sa.CheckConstraint("kind IN ('warmup', 'timed')", name=op.f("ck_iterations_kind")),
        sa.ForeignKeyConstraint(
            ["trial_id"],
            ["measurements.trial_id"],
            name=op.f("fk_iterations_trial_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("trial_id", "index", name=op.f("pk_iterations")),
    )
    op.create_table(
        "stage_memories",
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("stage", sa.Integer(), nullable=False),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["trial_id"],
            ["measurements.trial_id"],
            name=op.f("fk_stage_memories_trial_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("trial_id", "stage", name=op.f("pk_stage_memories")),
    )


def downgrade() -> None:
    op.drop_table("stage_memories")
    op.drop_table("iterations")
    op.drop_table("trial_logs")
    op.drop_table("measurements")
    op.drop_table("environments")
    op.drop_table("attempts")
    op.drop_table("trials")
    op.drop_table("workers")
    op.drop_table("driver_beats")
    op.drop_table("campaigns")

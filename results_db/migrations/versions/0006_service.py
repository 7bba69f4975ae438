"""What a group needs: tokens, the audit, events, idempotency keys, models and clusters of their own.

Revision: 0006, after 0005.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "campaigns", sa.Column("created_by", sa.String(64), server_default="", nullable=False)
    )
    op.add_column("campaigns", sa.Column("notes", sa.Text(), server_default="", nullable=False))
    op.add_column(
        "workers",
        sa.Column("idle_shared_node_seconds", sa.Double(), server_default="0", nullable=False),
    )
    # Until now, what a worker told was shared at once.
    op.execute("UPDATE workers SET idle_shared_node_seconds = idle_node_seconds")
    _create_driver_lease()
    op.create_index(op.f("ix_measurements_campaign_id_kin"), "measurements", ["campaign_id", "kin"])
    _create_tokens()
    _create_audit()
    _create_events()
    _create_idempotency_keys()
    _create_own_descriptions("user_models")
    _create_own_descriptions("user_clusters")
    # A campaign's deletion looks there for each of its trials.
    op.create_index(op.f("ix_knob_steps_trial_id"), "knob_steps", ["trial_id"])
    _create_standings()


def downgrade() -> None:
    # Tokens, the audit, events, notes and the users' own models and clusters are lost.
    op.drop_index(op.f("ix_knob_steps_trial_id"), table_name="knob_steps")
    _drop_standings()
    op.drop_table("user_clusters")
    op.drop_table("user_models")
    op.drop_table("idempotency_keys")
    op.drop_table("event_counter")
    op.drop_table("events")
    op.drop_table("audit")
    op.drop_table("tokens")
    _drop_driver_lease()
    op.drop_column("workers", "idle_shared_node_seconds")
    op.drop_index(op.f("ix_measurements_campaign_id_kin"), table_name="measurements")
    op.drop_column("campaigns", "notes")
    op.drop_column("campaigns", "created_by")


def _create_driver_lease() -> None:
    op.drop_table("driver_beats")
    lease = op.create_table(
        "driver_lease",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("fence", sa.BigInteger(), nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=True),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("released_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("id = 1", name=op.f("ck_driver_lease_is_one")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_driver_lease")),
    )
    op.bulk_insert(lease, [{"id": 1, "fence": 0, "host": "", "pid": 0}])
    sweeps = op.create_table(
        "sweeps",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("swept_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("id = 1", name=op.f("ck_sweeps_is_one")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sweeps")),
    )
    op.bulk_insert(sweeps, [{"id": 1}])


def _drop_driver_lease() -> None:
    op.drop_table("sweeps")
    op.drop_table("driver_lease")
    op.create_table(
        "driver_beats",
        sa.Column("name", sa.String(40), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_driver_beats")),
    )


def _create_tokens() -> None:
    op.create_table(
        "tokens",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("secret_hash", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("created_by", sa.String(64), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "role IN ('viewer', 'submitter', 'admin', 'worker')", name=op.f("ck_tokens_role")
        ),
        sa.CheckConstraint("length(secret_hash) = 64", name=op.f("ck_tokens_is_hashed")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("secret_hash", name=op.f("uq_tokens_secret_hash")),
    )
    op.create_index(
        "uq_tokens_name_live",
        "tokens",
        ["name"],
        unique=True,
        sqlite_where=sa.text("revoked_at IS NULL"),
        postgresql_where=sa.text("revoked_at IS NULL"),
    )


def _create_audit() -> None:
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("token_id", sa.Integer(), nullable=True),
        sa.Column("address", sa.String(64), nullable=False),
        sa.Column("action", sa.String(40), nullable=False),
        sa.Column("target_kind", sa.String(20), nullable=False),
        sa.Column("target", sa.String(255), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["token_id"], ["tokens.id"], name=op.f("fk_audit_token_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_index(op.f("ix_audit_at"), "audit", ["at"])
    op.create_index(op.f("ix_audit_actor_id"), "audit", ["actor", "id"])
    op.create_index(
        op.f("ix_audit_target_kind_target_id"), "audit", ["target_kind", "target", "id"]
    )


def _create_events() -> None:
    op.create_table(
        "events",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=True,
            nullable=False,
        ),
        sa.Column("seq", sa.BigInteger(), nullable=True),
        sa.Column("campaign_id", sa.Integer(), nullable=False),
        sa.Column("trial_id", sa.Integer(), nullable=True),
        sa.Column("kind", sa.String(40), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
        sa.UniqueConstraint("seq", name=op.f("uq_events_seq")),
    )
    op.create_index(op.f("ix_events_campaign_id_seq"), "events", ["campaign_id", "seq"])
    op.create_index(
        "ix_events_unsequenced",
        "events",
        ["id"],
        sqlite_where=sa.text("seq IS NULL"),
        postgresql_where=sa.text("seq IS NULL"),
    )
    counter = op.create_table(
        "event_counter",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("last_seq", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("pruned_seq", sa.BigInteger(), server_default="0", nullable=False),
        sa.CheckConstraint("id = 1", name=op.f("ck_event_counter_is_one")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event_counter")),
    )
    op.bulk_insert(counter, [{"id": 1, "last_seq": 0}])


def _create_idempotency_keys() -> None:
    op.create_table(
        "idempotency_keys",
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("request_hash", sa.String(64), nullable=False),
        sa.Column("campaign_id", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["campaign_id"],
            ["campaigns.id"],
            name=op.f("fk_idempotency_keys_campaign_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("actor", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index(op.f("ix_idempotency_keys_campaign_id"), "idempotency_keys", ["campaign_id"])
    op.create_index(op.f("ix_idempotency_keys_created_at"), "idempotency_keys", ["created_at"])


def _create_own_descriptions(table: str) -> None:
    op.create_table(
        table,
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("description", sa.JSON(), nullable=False),
        sa.Column("notes", sa.Text(), server_default="", nullable=False),
        sa.Column("created_by", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f(f"pk_{table}")),
    )


_RATES = (
    "tokens_per_s_per_device",
    "tokens_per_s",
    "model_tflops_per_device",
    "hardware_tflops_per_device",
)


def _create_standings() -> None:
    # Filled after the migration, by `results_db.standing_upkeep`: campaigns are at version 0 until then.
    op.add_column(
        "campaigns",
        sa.Column("standings_version", sa.Integer(), server_default="0", nullable=False),
    )
    op.create_table(
        "standings",
        sa.Column("trial_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("campaign_id", sa.Integer(), nullable=False),
        sa.Column("layout_key", sa.String(120), nullable=False),
        sa.Column("num_runs", sa.Integer(), nullable=False),
        sa.Column("shortened", sa.Boolean(), nullable=False),
        sa.Column("step_time_s", sa.Double(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        *(sa.Column(rate, sa.Double(), nullable=False) for rate in _RATES),
        sa.Column("tokens_per_node_hour", sa.Double(), nullable=False),
        sa.Column("log_step_time_s", sa.Double(), nullable=False),
        sa.Column("iterations_variance", sa.Double(), nullable=True),
        sa.Column("iterations_dof", sa.Integer(), nullable=False),
        sa.Column("runs_squares", sa.Double(), nullable=False),
        *(sa.Column(f"weighed_{place}", sa.Double(), nullable=True) for place in (1, 2, 3)),
        sa.Column("on_front", sa.Boolean(), nullable=False),
        sa.CheckConstraint(
            "num_runs > 0 AND step_time_s > 0", name=op.f("ck_standings_was_measured")
        ),
        sa.ForeignKeyConstraint(
            ["trial_id", "campaign_id"],
            ["trials.id", "trials.campaign_id"],
            name=op.f("fk_standings_trial_id_campaign_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("trial_id", name=op.f("pk_standings")),
        sa.UniqueConstraint(
            "campaign_id", "layout_key", name=op.f("uq_standings_campaign_id_layout_key")
        ),
    )
    op.create_index(op.f("ix_standings_campaign_id_value"), "standings", ["campaign_id", "value"])
    op.create_index(
        "ix_standings_campaign_id_on_front",
        "standings",
        ["campaign_id"],
        sqlite_where=sa.text("on_front = 1"),
        postgresql_where=sa.text("on_front"),
    )
    op.create_index(
        "ix_standings_campaign_id_repeated",
        "standings",
        ["campaign_id"],
        sqlite_where=sa.text("num_runs > 1"),
        postgresql_where=sa.text("num_runs > 1"),
    )
    # Nothing is ranked from the measurements any more.
    for rate in _RATES:
        op.drop_index(op.f(f"ix_measurements_campaign_id_{rate}"), table_name="measurements")
    op.create_index(
        op.f("ix_measurements_campaign_id_peak_memory_bytes"),
        "measurements",
        ["campaign_id", "peak_memory_bytes"],
    )


def _drop_standings() -> None:
    op.drop_index(op.f("ix_measurements_campaign_id_peak_memory_bytes"), table_name="measurements")
    for rate in _RATES:
        op.create_index(
            op.f(f"ix_measurements_campaign_id_{rate}"), "measurements", ["campaign_id", rate]
        )
    op.drop_table("standings")
    op.drop_column("campaigns", "standings_version")

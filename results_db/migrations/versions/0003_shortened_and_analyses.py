"""Probes that were stopped early, and what a campaign's trials say about its knobs.

Revision: 0003, after 0002.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Columns are added in place: to rebuild a table on SQLite deletes the rows that refer to it.
    op.add_column(
        "measurements",
        sa.Column("shortened", sa.Boolean(), server_default=sa.false(), nullable=False),
    )
    op.add_column("measurements", sa.Column("iterations_asked", sa.Integer(), nullable=True))
    _create_analyses()
    _create_importances()
    _create_steps()


def downgrade() -> None:
    op.drop_table("knob_steps")
    op.drop_table("knob_importances")
    op.drop_index(op.f("ix_analyses_winner_id"), table_name="analyses")
    op.drop_table("analyses")
    op.drop_column("measurements", "iterations_asked")
    op.drop_column("measurements", "shortened")


def _create_analyses() -> None:
    op.create_table(
        "analyses",
        sa.Column("campaign_id", sa.Integer(), nullable=False),
        sa.Column("winner_id", sa.Integer(), nullable=False),
        sa.Column("objective", sa.String(40), nullable=False),
        sa.Column("num_trials", sa.Integer(), nullable=False),
        sa.Column("last_ended_seq", sa.Integer(), nullable=False),
        sa.Column("method", sa.String(200), nullable=False),
        sa.Column("computed_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["campaign_id"],
            ["campaigns.id"],
            name=op.f("fk_analyses_campaign_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["winner_id"], ["trials.id"], name=op.f("fk_analyses_winner_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("campaign_id", name=op.f("pk_analyses")),
    )
    op.create_index(op.f("ix_analyses_winner_id"), "analyses", ["winner_id"])


def _create_importances() -> None:
    op.create_table(
        "knob_importances",
        sa.Column("campaign_id", sa.Integer(), nullable=False),
        sa.Column("knob", sa.String(40), nullable=False),
        sa.Column("importance", sa.Double(), nullable=False),
        sa.CheckConstraint(
            "importance >= 0 AND importance <= 1", name=op.f("ck_knob_importances_is_a_share")
        ),
        sa.ForeignKeyConstraint(
            ["campaign_id"],
            ["analyses.campaign_id"],
            name=op.f("fk_knob_importances_campaign_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("campaign_id", "knob", name=op.f("pk_knob_importances")),
    )


def _create_steps() -> None:
    op.create_table(
        "knob_steps",
        sa.Column("campaign_id", sa.Integer(), nullable=False),
        sa.Column("knob", sa.String(40), nullable=False),
        sa.Column("direction", sa.String(4), nullable=False),
        sa.Column("value", sa.String(40), nullable=False),
        sa.Column("stepped_value", sa.String(40), nullable=False),
        sa.Column("also", sa.String(200), nullable=False),
        sa.Column("layout_key", sa.String(120), nullable=False),
        sa.Column("source", sa.String(10), nullable=False),
        sa.Column("state", sa.String(14), nullable=False),
        sa.Column("effect", sa.Double(), nullable=True),
        sa.Column("is_apart", sa.Boolean(), nullable=True),
        sa.Column("trial_id", sa.Integer(), nullable=True),
        sa.CheckConstraint("direction IN ('down', 'up')", name=op.f("ck_knob_steps_direction")),
        sa.CheckConstraint(
            "source IN ('measured', 'predicted')", name=op.f("ck_knob_steps_source")
        ),
        sa.CheckConstraint(
            "state IN ('completed', 'out_of_memory', 'failed')", name=op.f("ck_knob_steps_state")
        ),
        sa.CheckConstraint(
            "(state = 'completed') = (effect IS NOT NULL)", name=op.f("ck_knob_steps_ran_or_not")
        ),
        sa.CheckConstraint(
            "source = 'measured' OR (trial_id IS NULL AND is_apart IS NULL)",
            name=op.f("ck_knob_steps_measured"),
        ),
        sa.ForeignKeyConstraint(
            ["campaign_id"],
            ["analyses.campaign_id"],
            name=op.f("fk_knob_steps_campaign_id"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["trial_id"], ["trials.id"], name=op.f("fk_knob_steps_trial_id"), ondelete="SET NULL"
        ),
        sa.PrimaryKeyConstraint("campaign_id", "knob", "direction", name=op.f("pk_knob_steps")),
    )

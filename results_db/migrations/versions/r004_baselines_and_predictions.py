"""Marks the trials of a campaign's baseline, and keeps what searches predicted.

Revision: r004, after r001.
"""

import sqlalchemy as sa
from alembic import op

revision = "r004"
down_revision = "r003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "trials",
        sa.Column("is_baseline", sa.Boolean(), server_default=sa.false(), nullable=False),
    )
    op.create_table(
        "predictions",
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("step_time_s", sa.Double(), nullable=False),
        sa.Column("log_step_time_sd", sa.Double(), nullable=False),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("fit_probability", sa.Double(), nullable=False),
        sa.Column("source", sa.String(16), nullable=False),
        sa.CheckConstraint(
            "step_time_s > 0 AND step_time_s < 1e300", name=op.f("ck_predictions_step_time")
        ),
        sa.CheckConstraint(
            "log_step_time_sd >= 0 AND peak_memory_bytes >= 0", name=op.f("ck_predictions_figures")
        ),
        sa.CheckConstraint(
            "fit_probability >= 0 AND fit_probability <= 1",
            name=op.f("ck_predictions_is_a_probability"),
        ),
        sa.CheckConstraint(
            "source IN ('estimates', 'calibrated')", name=op.f("ck_predictions_source")
        ),
        sa.ForeignKeyConstraint(
            ["trial_id"],
            ["trials.id"],
            name=op.f("fk_predictions_trial_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("trial_id", name=op.f("pk_predictions")),
    )


def downgrade() -> None:
    op.drop_table("predictions")
    op.drop_column("trials", "is_baseline")

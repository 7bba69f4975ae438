"""Trainers of campaigns, workers and measurements, and steps without a loss.

Revision: r005, after r004.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

from results_db.migrations.r001_tables import SCHEMA

revision = "r005"
down_revision = "r004"
branch_labels = None
depends_on = None

_OF_MEASUREMENT: dict[str, tuple[sa.types.TypeEngine[Any], Any]] = {
    "trainer": (sa.String(64), "embedded"),
    "trainer_version": (sa.String(64), ""),
    "tokens": (sa.String(16), "counted"),
    "losses_comparable": (sa.Boolean(), sa.true()),
}
"""New columns of measurements, with the values of the existing rows."""


def upgrade() -> None:
    op.add_column(
        "campaigns", sa.Column("trainer", sa.String(64), server_default="embedded", nullable=False)
    )
    op.execute("UPDATE campaigns SET trainer = 'imported' WHERE strategy = 'imported'")
    op.add_column("workers", sa.Column("trainers", sa.JSON(), server_default="{}", nullable=False))
    for name, (kind, default) in _OF_MEASUREMENT.items():
        column = sa.Column(name, kind, server_default=default, nullable=False)
        op.add_column("measurements", column)
    op.execute(
        "UPDATE measurements SET trainer = 'imported' WHERE campaign_id IN "
        "(SELECT id FROM campaigns WHERE trainer = 'imported')"
    )
    with op.batch_alter_table("iterations", copy_from=SCHEMA.tables["iterations"]) as iterations:
        iterations.alter_column("loss", existing_type=sa.Double(), nullable=True)


def downgrade() -> None:
    op.execute("UPDATE iterations SET loss = 0 WHERE loss IS NULL")
    with op.batch_alter_table("iterations", copy_from=SCHEMA.tables["iterations"]) as iterations:
        iterations.alter_column("loss", existing_type=sa.Double(), nullable=False)
    for name in _OF_MEASUREMENT:
        op.drop_column("measurements", name)
    op.drop_column("workers", "trainers")
    op.drop_column("campaigns", "trainer")

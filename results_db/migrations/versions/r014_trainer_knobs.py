"""The job knobs that campaigns may set, by trainer, of each worker.

Revision: r014, after r013. A database that r007 has just created has the column already: it creates
the tables of the models.
"""

import sqlalchemy as sa
from alembic import op

revision = "r014"
down_revision = "r013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if "trainer_knobs" not in _columns():
        column = sa.Column("trainer_knobs", sa.JSON, nullable=False, server_default="{}")
        op.add_column("workers", column)


def downgrade() -> None:
    if "trainer_knobs" in _columns():
        op.drop_column("workers", "trainer_knobs")


def _columns() -> set[str]:
    return {each["name"] for each in sa.inspect(op.get_bind()).get_columns("workers")}

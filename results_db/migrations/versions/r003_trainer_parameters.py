"""The parameters that workers declare for their trainers; those of earlier sessions are unknown.

Revision: r003, after r002.
"""

import sqlalchemy as sa
from alembic import op

revision = "r003"
down_revision = "r002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("trainer_parameters", sa.JSON(), server_default="{}", nullable=False)
    op.add_column("workers", column)


def downgrade() -> None:
    op.drop_column("workers", "trainer_parameters")

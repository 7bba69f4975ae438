"""Smaller ZeRO groups.

Revision: 0002, after 0001.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # Until now every shard group was as large as dp. Added in place: to rebuild a table on SQLite
    # would delete the rows that refer to it.
    op.add_column(
        "trials", sa.Column("zero_replicas", sa.Integer(), server_default="1", nullable=False)
    )


def downgrade() -> None:
    op.drop_column("trials", "zero_replicas")

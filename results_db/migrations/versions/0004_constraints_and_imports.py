"""Constraints of a campaign, and measurements that others took.

Revision: 0004, after 0003.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("campaigns", sa.Column("max_peak_memory_bytes", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    op.drop_column("campaigns", "max_peak_memory_bytes")

"""Cheap probes: of which layout a trial runs a part.

Revision: r007, after r006.
"""

import sqlalchemy as sa
from alembic import op

revision = "r007"
down_revision = "r006"
branch_labels = None
depends_on = None

_COLUMNS = ("full_num_nodes", "full_dp", "full_num_microbatches", "num_layers")


def upgrade() -> None:
    for name in _COLUMNS:
        op.add_column("trials", sa.Column(name, sa.Integer(), nullable=True))


def downgrade() -> None:
    # Without the columns a cheap probe would be taken for a trial of a layout.
    op.execute("DELETE FROM trials WHERE num_layers IS NOT NULL")
    for name in _COLUMNS:
        op.drop_column("trials", name)

"""The table of plans that the driver makes.

Revision: r006, after r005.
"""

import sqlalchemy as sa
from alembic import op

revision = "r006"
down_revision = "r005"
branch_labels = None
depends_on = None

TABLE = "plans"


def upgrade() -> None:
    op.create_table(
        TABLE,
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(8), nullable=False),
        sa.Column("created_by", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("answer", sa.JSON(), nullable=False),
        sa.Column("problem", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f(f"pk_{TABLE}")),
        sa.CheckConstraint(
            "state IN ('WAITING', 'DONE', 'FAILED')", name=op.f(f"ck_{TABLE}_state")
        ),
        sa.CheckConstraint(
            "(state = 'WAITING') = (ended_at IS NULL)", name=op.f(f"ck_{TABLE}_end")
        ),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f(f"ix_{TABLE}_state_id"), TABLE, ["state", "id"])


def downgrade() -> None:
    op.drop_table(TABLE)

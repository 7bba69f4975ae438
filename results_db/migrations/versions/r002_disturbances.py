"""What others took of a probe's devices, and why a trial is repeated; unknown of earlier rows.

Revision: r002, after r001.
"""

import sqlalchemy as sa
from alembic import op

revision = "r002"
down_revision = "r001"
branch_labels = None
depends_on = None

_COLUMNS = (
    (
        "measurements",
        "others_share",
        sa.Double(),
        "others_share >= 0 AND others_share <= 1",
    ),
    ("measurements", "throttled", sa.Boolean(), None),
    (
        "trials",
        "repeat_reason",
        sa.String(16),
        "repeat_reason IN ('best', 'tie', 'doubted', 'disturbed', 'request')",
    ),
)
"""Table, column, type, and the condition of its check.

The check is part of the column: SQLite then adds and drops both without rebuilding the table, which
would drop the table's triggers.
"""


def upgrade() -> None:
    dialect = op.get_bind().dialect
    for table, column, kind, condition in _COLUMNS:
        check = f" CONSTRAINT ck_{table}_{column} CHECK ({condition})" if condition else ""
        op.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind.compile(dialect)}{check}")


def downgrade() -> None:
    for table, column, *_ in _COLUMNS:
        op.execute(f"ALTER TABLE {table} DROP COLUMN {column}")

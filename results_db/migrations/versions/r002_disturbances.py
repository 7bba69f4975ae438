"""What others took of a probe's devices, and why a trial repeats another; unknown of earlier rows.

Revision: r002, after r001.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "r002"
down_revision = "r001"
branch_labels = None
depends_on = None

_REASONS = "('best', 'tie', 'doubted', 'disturbed', 'request')"
_COLUMNS: tuple[tuple[str, str, sa.types.TypeEngine[Any], str], ...] = (
    ("measurements", "others_share", sa.Double(), "others_share >= 0 AND others_share <= 1"),
    ("measurements", "throttled", sa.Boolean(), ""),
    ("trials", "repeat_reason", sa.String(16), f"repeat_reason IN {_REASONS}"),
)
"""Table, column, type, and the condition of a check. The check is part of its column: SQLite adds
and drops both without rebuilding the table, which would drop the table's triggers."""


def upgrade() -> None:
    dialect = op.get_bind().dialect
    for table, column, kind, condition in _COLUMNS:
        check = f" CONSTRAINT ck_{table}_{column} CHECK ({condition})" if condition else ""
        op.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind.compile(dialect)}{check}")


def downgrade() -> None:
    for table, column, *_ in _COLUMNS:
        op.execute(f"ALTER TABLE {table} DROP COLUMN {column}")

"""Expert parallelism, and room for the longer keys of layouts.

Revision: r005, after r004. Earlier trials do not divide experts, and spend no time on it.
"""

import sqlalchemy as sa
from alembic import op

revision = "r005"
down_revision = "r004"
branch_labels = None
depends_on = None

_KNOBS = ("ep", "etp")
_TABLES_WITH_KEYS = ("trials", "knob_steps")


def upgrade() -> None:
    for name in _KNOBS:
        check = f"CONSTRAINT ck_trials_{name} CHECK ({name} >= 1)"
        op.execute(f"ALTER TABLE trials ADD COLUMN {name} INTEGER DEFAULT 1 NOT NULL {check}")
    part = sa.Column[float]("ep_s", sa.Double(), server_default="0", nullable=False)
    op.add_column("breakdowns", part)
    _limit_keys(200)


def downgrade() -> None:
    _limit_keys(120)
    op.drop_column("breakdowns", "ep_s")
    for name in reversed(_KNOBS):
        op.execute(f"ALTER TABLE trials DROP COLUMN {name}")


def _limit_keys(length: int) -> None:
    """Sets the length of layout keys; SQLite checks none, and would have to write new tables."""
    if op.get_bind().dialect.name == "sqlite":
        return
    for table in _TABLES_WITH_KEYS:
        op.execute(f"ALTER TABLE {table} ALTER COLUMN layout_key TYPE VARCHAR({length})")

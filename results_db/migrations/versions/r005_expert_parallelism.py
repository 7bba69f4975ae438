"""Expert parallelism, which earlier trials do not use and spend no time on.

Revision: r005, after r004.
"""

import sqlalchemy as sa
from alembic import op

revision = "r005"
down_revision = "r004"
branch_labels = None
depends_on = None

_KNOBS = ("ep", "etp")


def upgrade() -> None:
    for name in _KNOBS:
        check = f"CONSTRAINT ck_trials_{name} CHECK ({name} >= 1)"
        op.execute(f"ALTER TABLE trials ADD COLUMN {name} INTEGER DEFAULT 1 NOT NULL {check}")
    part = sa.Column[float]("ep_s", sa.Double(), server_default="0", nullable=False)
    op.add_column("breakdowns", part)


def downgrade() -> None:
    op.drop_column("breakdowns", "ep_s")
    for name in reversed(_KNOBS):
        op.execute(f"ALTER TABLE trials DROP COLUMN {name}")

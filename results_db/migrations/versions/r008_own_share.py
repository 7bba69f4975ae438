"""What the product's own processes took of a probe's devices.

Revision: r008, after r007. A database that r007 has just created has the column already: it creates
the tables of the models.
"""

import sqlalchemy as sa
from alembic import op

revision = "r008"
down_revision = "r007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if "own_share" not in _columns():
        op.add_column("measurements", sa.Column("own_share", sa.Double))


def downgrade() -> None:
    if "own_share" in _columns():
        op.drop_column("measurements", "own_share")


def _columns() -> set[str]:
    return {each["name"] for each in sa.inspect(op.get_bind()).get_columns("measurements")}

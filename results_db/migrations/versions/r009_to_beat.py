"""What the probes of a campaign must beat, which leases read.

Revision: r009, after r008. A database that r007 has just created has the column already: it creates
the tables of the models. Older campaigns get their value at the next run that is ranked.
"""

import sqlalchemy as sa
from alembic import op

revision = "r009"
down_revision = "r008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if "to_beat" not in _columns():
        op.add_column("campaigns", sa.Column("to_beat", sa.JSON))


def downgrade() -> None:
    if "to_beat" in _columns():
        op.drop_column("campaigns", "to_beat")


def _columns() -> set[str]:
    return {each["name"] for each in sa.inspect(op.get_bind()).get_columns("campaigns")}

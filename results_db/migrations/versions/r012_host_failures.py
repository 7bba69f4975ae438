"""How many trials of a campaign failed because a host lacks a resource, since it was resumed.

Revision: r012, after r011. A database that r007 has just created has the column already: it creates
the tables of the models.
"""

import sqlalchemy as sa
from alembic import op

revision = "r012"
down_revision = "r011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if "host_failures" not in _columns():
        number = sa.Column("host_failures", sa.Integer, nullable=False, server_default="0")
        op.add_column("campaigns", number)


def downgrade() -> None:
    if "host_failures" in _columns():
        op.drop_column("campaigns", "host_failures")


def _columns() -> set[str]:
    return {each["name"] for each in sa.inspect(op.get_bind()).get_columns("campaigns")}

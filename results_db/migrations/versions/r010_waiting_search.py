"""Why the driver has not opened a campaign's search, which the progress shows.

Revision: r010, after r009. A database that r007 has just created has the column already: it creates
the tables of the models.
"""

import sqlalchemy as sa
from alembic import op

revision = "r010"
down_revision = "r009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if "waiting_because" not in _columns():
        op.add_column(
            "campaigns", sa.Column("waiting_because", sa.Text, nullable=False, server_default="")
        )


def downgrade() -> None:
    if "waiting_because" in _columns():
        op.drop_column("campaigns", "waiting_because")


def _columns() -> set[str]:
    return {each["name"] for each in sa.inspect(op.get_bind()).get_columns("campaigns")}

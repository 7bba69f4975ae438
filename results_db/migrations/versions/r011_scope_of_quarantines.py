"""Whose workers a quarantine counts for and who reported it; the nodes that workers cannot use.

Revision: r011, after r010. A database that r007 has just created has the columns already: it
creates the tables of the models. Older quarantines have an unknown reporter, and count for all
workers of their cluster until they are released.
"""

import sqlalchemy as sa
from alembic import op

revision = "r011"
down_revision = "r010"
branch_labels = None
depends_on = None

_TABLE = "node_quarantines"
_KEY = "pk_node_quarantines"


def upgrade() -> None:
    if "scope" not in _columns(_TABLE):
        with op.batch_alter_table(_TABLE) as table:
            for name in ("scope", "reported_by"):
                table.add_column(sa.Column(name, sa.String(64), server_default="", nullable=False))
            table.drop_constraint(_KEY, type_="primary")
            table.create_primary_key(_KEY, ["cluster", "node", "scope"])
    if "num_unusable" not in _columns("workers"):
        number = sa.Column("num_unusable", sa.Integer, server_default="0", nullable=False)
        op.add_column("workers", number)
        op.execute(
            "UPDATE workers SET num_unusable = (SELECT count(*) FROM allocation_nodes "
            "WHERE worker_id = workers.id AND state IN ('lost', 'quarantined'))"
        )


def downgrade() -> None:
    if "scope" in _columns(_TABLE):
        # A node keeps one row: that of a user, if there is one.
        op.execute(
            "DELETE FROM node_quarantines WHERE scope <> (SELECT min(scope) "
            "FROM node_quarantines AS other WHERE other.cluster = node_quarantines.cluster "
            "AND other.node = node_quarantines.node)"
        )
        with op.batch_alter_table(_TABLE) as table:
            table.drop_constraint(_KEY, type_="primary")
            table.create_primary_key(_KEY, ["cluster", "node"])
            table.drop_column("reported_by")
            table.drop_column("scope")
    if "num_unusable" in _columns("workers"):
        op.drop_column("workers", "num_unusable")


def _columns(table: str) -> set[str]:
    return {each["name"] for each in sa.inspect(op.get_bind()).get_columns(table)}

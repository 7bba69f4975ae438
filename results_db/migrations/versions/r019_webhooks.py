"""Webhooks and the outbox of their messages.

Revision: r019, after r018. A database that r007 has just created has the tables already.
"""

from alembic import op

from layout_tuner.results_db.models.all_tables import METADATA

revision = "r019"
down_revision = "r018"
branch_labels = None
depends_on = None

_TABLES = ("webhooks", "webhook_messages")


def upgrade() -> None:
    METADATA.create_all(op.get_bind(), tables=[METADATA.tables[name] for name in _TABLES])


def downgrade() -> None:
    for name in reversed(_TABLES):
        op.drop_table(name)

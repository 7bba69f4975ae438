"""A migration of a next version, which exists for tests of upgrades alone.

It does what migrations do: it adds a column, rewrites values, rebuilds a table that others refer
to, holds existing rows to a new check, and makes a table out of rows.

Revision: r999, after the last of the package.
"""

import sqlalchemy as sa
from alembic import op

from layout_tuner.results_db.migrations import migrate
from layout_tuner.results_db.models.all_tables import METADATA

revision = "r999"
down_revision = migrate.revisions((migrate.SCRIPTS / "versions",))[-1]
branch_labels = None
depends_on = None

WORKERS = METADATA.tables["workers"].to_metadata(sa.MetaData())
"""The table as the revision before leaves it."""

CHECK = "ck_workers_devices_are_few"


def upgrade() -> None:
    op.add_column(
        "campaigns", sa.Column("importance", sa.Integer(), server_default="0", nullable=False)
    )
    op.execute("UPDATE campaigns SET importance = last_number")
    op.execute("UPDATE campaigns SET notes = 'no notes' WHERE notes = ''")
    # SQLite rebuilds the table, which holds the checks and indexes of the definition given here.
    with op.batch_alter_table("workers", copy_from=WORKERS) as workers:
        workers.create_check_constraint(op.f(CHECK), "devices_per_node <= 64")
    op.create_table(
        "campaign_layouts",
        sa.Column("campaign_id", sa.Integer(), nullable=False),
        sa.Column("num_layouts", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["campaign_id"], ["campaigns.id"], ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("campaign_id"),
    )
    op.execute(
        "INSERT INTO campaign_layouts SELECT campaign_id, count(DISTINCT layout_key) "
        "FROM trials GROUP BY campaign_id"
    )


def downgrade() -> None:
    op.drop_table("campaign_layouts")
    if op.get_bind().dialect.name == "sqlite":
        with op.batch_alter_table("workers", copy_from=WORKERS, recreate="always"):
            pass
    else:
        op.drop_constraint(CHECK, "workers")
    op.execute("UPDATE campaigns SET notes = '' WHERE notes = 'no notes'")
    op.drop_column("campaigns", "importance")

"""The split of layers over pipeline stages; earlier trials split the transformer layers alone.

Revision: r004, after r003.
"""

from alembic import op

revision = "r004"
down_revision = "r003"
branch_labels = None
depends_on = None

_SPLITS = "('layers', 'embedding', 'head', 'embedding_and_head')"


def upgrade() -> None:
    # The check is part of the column: SQLite adds both without rebuilding the table (see r002).
    op.execute(
        "ALTER TABLE trials ADD COLUMN pipeline_split VARCHAR(24) DEFAULT 'layers' NOT NULL "
        f"CONSTRAINT ck_trials_pipeline_split CHECK (pipeline_split IN {_SPLITS})"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE trials DROP COLUMN pipeline_split")

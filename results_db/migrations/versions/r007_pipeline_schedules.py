"""The pipeline's schedule.

Revision: r007, after r006. Earlier trials have the default one, 1F1B.
"""

from alembic import op

revision = "r007"
down_revision = "r006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    check = "CONSTRAINT ck_trials_schedule CHECK (schedule IN ('1f1b', 'gpipe', 'zero_bubble'))"
    op.execute(
        f"ALTER TABLE trials ADD COLUMN schedule VARCHAR(16) DEFAULT '1f1b' NOT NULL {check}"
    )


def downgrade() -> None:
    op.execute("ALTER TABLE trials DROP COLUMN schedule")

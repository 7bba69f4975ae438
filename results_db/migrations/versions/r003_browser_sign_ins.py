"""The table of one-time codes and of sessions of browsers.

Revision: r003, after r001.
"""

import sqlalchemy as sa
from alembic import op

revision = "r003"
down_revision = "r002"
branch_labels = None
depends_on = None

TABLE = "browser_sign_ins"


def upgrade() -> None:
    op.create_table(
        TABLE,
        sa.Column("secret_hash", sa.String(64), nullable=False),
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("token_hash", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("secret_hash", name=op.f(f"pk_{TABLE}")),
        sa.CheckConstraint("kind IN ('code', 'session')", name=op.f(f"ck_{TABLE}_kind")),
        sa.CheckConstraint("length(secret_hash) = 64", name=op.f(f"ck_{TABLE}_is_hashed")),
    )
    for columns in (["token_hash", "kind", "expires_at"], ["expires_at"]):
        op.create_index(op.f(f"ix_{TABLE}_{'_'.join(columns)}"), TABLE, columns)


def downgrade() -> None:
    op.drop_table(TABLE)

"""Constraints of a campaign, and measurements that others took.

Revision: 0004, after 0003.
"""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_UNTOLD: dict[str, sa.types.TypeEngine[Any]] = {
    "step_time_q25_s": sa.Double(),
    "step_time_q75_s": sa.Double(),
    "peak_tflops_per_device": sa.Double(),
    "peak_source": sa.String(length=200),
    "mfu": sa.Double(),
    "hfu": sa.Double(),
    "peak_memory_bytes": sa.BigInteger(),
    "memory_kind": sa.String(length=40),
    "skipped_steps": sa.Integer(),
}
"""Figures that a table from elsewhere may not tell."""


def upgrade() -> None:
    op.add_column("campaigns", sa.Column("max_peak_memory_bytes", sa.BigInteger(), nullable=True))
    for name, kind in _UNTOLD.items():
        _make_nullable(name, kind)
    op.create_table(
        "imports",
        sa.Column("campaign_id", sa.Integer(), nullable=False),
        sa.Column("source", sa.String(length=1000), nullable=False),
        sa.Column("aside_columns", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["campaign_id"],
            ["campaigns.id"],
            name=op.f("fk_imports_campaign_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("campaign_id", name=op.f("pk_imports")),
    )
    op.create_table(
        "imported_rows",
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("line", sa.Integer(), nullable=False),
        sa.Column("unstated", sa.JSON(), nullable=False),
        sa.Column("aside", sa.JSON(), nullable=False),
        sa.Column("peak_memory_bytes", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(
            ["trial_id"],
            ["trials.id"],
            name=op.f("fk_imported_rows_trial_id"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("trial_id", name=op.f("pk_imported_rows")),
    )


def downgrade() -> None:
    # Earlier schemas would drive what nobody submitted, and have no place for what is not told.
    # SQLite does not follow references while its schema is changed: what refers to them goes by itself.
    imported = "SELECT campaign_id FROM imports"
    for table in ("knob_importances", "knob_steps", "analyses", "measurements", "trials"):
        op.execute(f"DELETE FROM {table} WHERE campaign_id IN ({imported})")  # noqa: S608 - names of ours
    op.execute(f"DELETE FROM campaigns WHERE id IN ({imported})")  # noqa: S608 - names of ours
    op.drop_table("imported_rows")
    op.drop_table("imports")
    if op.get_bind().dialect.name != "sqlite":
        for name, kind in _UNTOLD.items():
            op.alter_column("measurements", name, existing_type=kind, nullable=False)
    # On SQLite the columns stay nullable, which hurts nobody: there is no NULL in them.
    op.drop_column("campaigns", "max_peak_memory_bytes")


def _make_nullable(name: str, kind: sa.types.TypeEngine[Any]) -> None:
    """Lets a column of the measurements be NULL.

    SQLite cannot alter a column, and to rebuild the table there deletes the rows that refer to it: a
    new column takes the old one's place.
    """
    if op.get_bind().dialect.name != "sqlite":
        op.alter_column(
            "measurements", name, existing_type=kind, nullable=True, server_default=None
        )
        return
    op.add_column("measurements", sa.Column(f"{name}_new", kind, nullable=True))
    op.execute(f"UPDATE measurements SET {name}_new = {name}")  # noqa: S608 - a name of ours
    op.drop_column("measurements", name)
    op.execute(f"ALTER TABLE measurements RENAME COLUMN {name}_new TO {name}")

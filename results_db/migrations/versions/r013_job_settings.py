"""The settings of a trial's job beside its layout, and the longer keys that they make.

Revision: r013, after r012. A database that r007 has just created has them already: it creates the
tables of the models. A trial of an earlier database has none, and keeps its key.
"""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "r013"
down_revision = "r012"
branch_labels = None
depends_on = None

_INDEX = "ix_trials_campaign_id_job"
_LONGER = {
    "trials": {"layout_key": 640},
    "knob_steps": {"layout_key": 640, "knob": 64, "value": 64, "stepped_value": 64, "also": 1000},
    "knob_importances": {"knob": 64},
}
"""New lengths of columns by table; SQLite checks no lengths."""


def upgrade() -> None:
    if "job" not in _columns():
        op.add_column("trials", sa.Column("job", sa.JSON().with_variant(JSONB(), "postgresql")))
        where = sa.text("job IS NOT NULL")
        columns = ["campaign_id", "job"]
        op.create_index(_INDEX, "trials", columns, sqlite_where=where, postgresql_where=where)
    if op.get_bind().dialect.name == "postgresql":
        for table, lengths in _LONGER.items():
            for column, length in lengths.items():
                op.alter_column(table, column, type_=sa.String(length))


def downgrade() -> None:
    if "job" in _columns():
        op.drop_index(_INDEX, "trials")
        op.drop_column("trials", "job")


def _columns() -> set[str]:
    return {each["name"] for each in sa.inspect(op.get_bind()).get_columns("trials")}

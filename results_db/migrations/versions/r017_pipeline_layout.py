"""The layers of each stage of a pipeline that is written out, and V-shaped schedules.

Revision: r017, after r016. A database that r007 has just created has the column already: it creates
the tables of the models. Earlier trials split their layers as `pipeline_split` says.
"""

import sqlalchemy as sa
from alembic import op

from layout_tuner.results_db.migrations.checks import refuse_rows, set_checks
from layout_tuner.results_db.models.table_base import one_of
from layout_tuner.search_spaces.layouts.layout import SCHEDULES

revision = "r017"
down_revision = "r016"
branch_labels = None
depends_on = None

_CHECK = "ck_trials_schedule"
_VALUES = ("value", "stepped_value")
"""Values of knobs in a campaign's analysis, in `knob_steps`."""


def upgrade() -> None:
    if "pipeline_layout" not in _columns():
        column = sa.Column(
            "pipeline_layout", sa.String(160), nullable=False, server_default="split"
        )
        op.add_column("trials", column)
    set_checks("trials", {_CHECK: one_of("schedule", SCHEDULES)})
    _set_length(160)


def downgrade() -> None:
    if "pipeline_layout" in _columns():
        before = one_of("schedule", ("1f1b", "gpipe", "zero_bubble"))
        refuse_rows("trials", "schedule", f"NOT {before}")
        refuse_rows("trials", "pipeline_layout", "pipeline_layout <> 'split'")
        set_checks("trials", {_CHECK: before})
        op.drop_column("trials", "pipeline_layout")
        _set_length(64)


def _set_length(length: int) -> None:
    if op.get_bind().dialect.name == "postgresql":  # SQLite checks no lengths
        for name in _VALUES:
            op.alter_column("knob_steps", name, type_=sa.String(length))


def _columns() -> set[str]:
    return {each["name"] for each in sa.inspect(op.get_bind()).get_columns("trials")}

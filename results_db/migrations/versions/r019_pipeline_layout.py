"""The layers of each stage of a pipeline that is written out, and V-shaped schedules.

Revision: r019, after r018. A database that r007 has just created has the column already: it creates
the tables of the models. Earlier trials split their layers as `pipeline_split` says.
"""

import sqlalchemy as sa
from alembic import op

from layout_tuner.results_db.migrations.checks import set_checks
from layout_tuner.results_db.models.table_base import one_of
from layout_tuner.search_spaces.layouts.layout import SCHEDULES

revision = "r019"
down_revision = "r018"
branch_labels = None
depends_on = None

_CHECK = "ck_trials_schedule"


def upgrade() -> None:
    if "pipeline_layout" not in _columns():
        column = sa.Column(
            "pipeline_layout", sa.String(160), nullable=False, server_default="split"
        )
        op.add_column("trials", column)
    set_checks("trials", {_CHECK: one_of("schedule", SCHEDULES)})


def downgrade() -> None:
    if "pipeline_layout" in _columns():
        set_checks("trials", {_CHECK: one_of("schedule", ("1f1b", "gpipe", "zero_bubble"))})
        op.drop_column("trials", "pipeline_layout")


def _columns() -> set[str]:
    return {each["name"] for each in sa.inspect(op.get_bind()).get_columns("trials")}

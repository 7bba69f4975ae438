"""Recomputation by module and layer, offload, and the type of the optimizer's states.

Revision: r016, after r015. A database that r007 has just created has the columns already: it
creates the tables of the models. Earlier trials recompute as they did, in all layers.
"""

import sqlalchemy as sa
from alembic import op

from layout_tuner.results_db.migrations.checks import refuse_rows, set_checks
from layout_tuner.results_db.models.table_base import one_of
from layout_tuner.search_spaces.layouts.layout import KNOBS

revision = "r016"
down_revision = "r015"
branch_labels = None
depends_on = None

_COLUMNS = {
    "recompute_layers": (64, "all"),
    "offload": (16, "none"),
    "optimizer_states": (8, "fp32"),
}
"""The length and the default of each column."""
_LONGER = {"trials": {"recompute": 64, "layout_key": 1000}, "knob_steps": {"layout_key": 1000}}
_CHECKED = ("recompute", "offload", "optimizer_states")


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":  # SQLite checks no lengths
        for table, lengths in _LONGER.items():
            for name, length in lengths.items():
                op.alter_column(table, name, type_=sa.String(length))
    if not _has_columns():
        for name, (length, default) in _COLUMNS.items():
            column = sa.Column(name, sa.String(length), nullable=False, server_default=default)
            op.add_column("trials", column)
        checks = {f"ck_trials_{name}": one_of(name, KNOBS[name].choices) for name in _CHECKED}
        set_checks("trials", checks)


def downgrade() -> None:
    if _has_columns():
        before = one_of("recompute", ("none", "selective", "full"))
        refuse_rows("trials", "recompute", f"NOT {before}")
        for name, (_, default) in _COLUMNS.items():
            refuse_rows("trials", name, f"{name} <> '{default}'")
        set_checks("trials", {f"ck_trials_{name}": None for name in _CHECKED})
        set_checks("trials", {"ck_trials_recompute": before})
        for name in _COLUMNS:
            op.drop_column("trials", name)


def _has_columns() -> bool:
    columns = sa.inspect(op.get_bind()).get_columns("trials")
    return "offload" in {each["name"] for each in columns}

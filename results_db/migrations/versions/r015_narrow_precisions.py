"""The precisions fp8_block, mxfp8 and nvfp4 in the check and the length of `trials.precision`.

Revision: r015, after r014. A database that r007 has just created has them already: it creates the
tables of the models.
"""

import sqlalchemy as sa
from alembic import op

from layout_tuner.results_db.migrations.checks import refuse_rows, set_checks
from layout_tuner.results_db.models.table_base import one_of
from layout_tuner.search_spaces.layouts.layout import PRECISIONS

revision = "r015"
down_revision = "r014"
branch_labels = None
depends_on = None

_BEFORE = ("fp32", "bf16", "fp16", "fp8")


def upgrade() -> None:
    _change(PRECISIONS, 16)


def downgrade() -> None:
    refuse_rows("trials", "precision", f"NOT {one_of('precision', _BEFORE)}")
    _change(_BEFORE, 8)


def _change(words: tuple[str, ...], length: int) -> None:
    if op.get_bind().dialect.name == "postgresql":  # SQLite checks no lengths
        op.alter_column("trials", "precision", type_=sa.String(length))
    set_checks("trials", {"ck_trials_precision": one_of("precision", words)})

"""The precisions fp8_block, mxfp8 and nvfp4 in the check and the length of `trials.precision`.

Revision: r017, after r014. A database that r007 has just created has them already: it creates the
tables of the models.
"""

import sqlalchemy as sa
from alembic import op

from layout_tuner.results_db.errors import DatabaseInvalidError

revision = "r017"
down_revision = "r014"
branch_labels = None
depends_on = None

_CHECK = "ck_trials_precision"
_BEFORE = ("precision IN ('fp32', 'bf16', 'fp16', 'fp8')", 8)
_AFTER = ("precision IN ('fp32', 'bf16', 'fp16', 'fp8', 'fp8_block', 'mxfp8', 'nvfp4')", 16)
"""The check and the length."""


def upgrade() -> None:
    _change(_BEFORE, _AFTER)


def downgrade() -> None:
    query = "SELECT min(precision) FROM trials WHERE precision IN ('fp8_block', 'mxfp8', 'nvfp4')"
    if found := op.get_bind().scalar(sa.text(query)):
        raise DatabaseInvalidError(
            f"trials have precision={found}, which the earlier version lacks: delete their "
            "campaigns, or restore a backup of that version"
        )
    _change(_AFTER, _BEFORE)


def _change(before: tuple[str, int], after: tuple[str, int]) -> None:
    bind = op.get_bind()
    if bind.dialect.name == "postgresql":
        op.drop_constraint(_CHECK, "trials")
        op.alter_column("trials", "precision", type_=sa.String(after[1]))
        op.create_check_constraint(op.f(_CHECK), "trials", after[0])
        return
    # Only the text of the table changes (sqlite.org/lang_altertable.html, section 7).
    length = "precision VARCHAR({}) NOT NULL"
    texts = (before[0], after[0], length.format(before[1]), length.format(after[1]))
    query = "UPDATE sqlite_master SET sql = replace(replace(sql, ?, ?), ?, ?) WHERE name = 'trials'"
    version = bind.exec_driver_sql("PRAGMA schema_version").scalar_one()
    bind.exec_driver_sql("PRAGMA writable_schema = ON")
    bind.exec_driver_sql(query, texts)
    bind.exec_driver_sql(f"PRAGMA schema_version = {version + 1}")
    bind.exec_driver_sql("PRAGMA writable_schema = OFF")

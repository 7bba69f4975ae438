"""Layouts of today: fp8, and ZeRO stages 2 and 3.

Revision: r004, after r003.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import sqlalchemy as sa
from alembic import op

from results_db.migrations.r001_tables import SCHEMA

revision = "r004"
down_revision = "r003"
branch_labels = None
depends_on = None

_REASONS = "('best', 'tie', 'doubted', 'disturbed', 'request')"  # of r002

_BEFORE = {
    "precision": "precision IN ('fp32', 'bf16', 'fp16')",
    "zero_stage": "zero_stage IN (0, 1)",
}
_AFTER = {
    "precision": "precision IN ('fp32', 'bf16', 'fp16', 'fp8')",
    "zero_stage": "zero_stage IN (0, 1, 2, 3)",
}


def upgrade() -> None:
    _replace_checks(_BEFORE, _AFTER)


def downgrade() -> None:
    _replace_checks(_AFTER, _BEFORE)


def _replace_checks(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    trials = SCHEMA.tables["trials"].to_metadata(sa.MetaData())
    reasons = sa.CheckConstraint(f"repeat_reason IN {_REASONS}", op.f("ck_trials_repeat_reason"))
    trials.append_column(sa.Column("repeat_reason", sa.String(16), reasons))
    names = {_name(each) for each in before}
    for check in [each for each in trials.constraints if str(each.name) in names]:
        trials.constraints.remove(check)
    for name, condition in before.items():
        trials.append_constraint(sa.CheckConstraint(condition, op.f(_name(name))))
    with _without_triggers(), op.batch_alter_table("trials", copy_from=trials) as batch:
        for name, condition in after.items():
            batch.drop_constraint(op.f(_name(name)), type_="check")
            batch.create_check_constraint(op.f(_name(name)), condition)


def _name(check: str) -> str:
    return f"ck_trials_{check}"


@contextmanager
def _without_triggers() -> Iterator[None]:
    """SQLite changes a check by a new table, and refuses to while a trigger refers to the old."""
    connection, triggers = op.get_bind(), {}
    if connection.dialect.name == "sqlite":
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
        triggers = dict(map(tuple, connection.exec_driver_sql(query)))
    for name in triggers:
        op.execute(f"DROP TRIGGER {name}")
    yield
    for sql in triggers.values():
        op.execute(sql)

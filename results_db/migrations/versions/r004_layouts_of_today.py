"""Layouts of today: other splits of pipelines, ZeRO stages 2 and 3, and fp8.

Revision: r004, after r003. Earlier trials have the defaults of the new columns.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import sqlalchemy as sa
from alembic import op

from results_db.migrations.r001_tables import SCHEMA

revision = "r004"
down_revision = "r003"
branch_labels = None
depends_on = None


class _ChangedCheck(NamedTuple):
    """A check of the table that changes."""

    name: str
    before: str
    after: str


class _NewColumn(NamedTuple):
    """A column that is added, with a check of its own."""

    name: str
    type: sa.types.TypeEngine[Any]
    default: str
    condition: str

    def column(self) -> sa.Column[Any]:
        check = sa.CheckConstraint(self.condition, op.f(f"ck_trials_{self.name}"))
        default = sa.text(self.default)
        return sa.Column(self.name, self.type, check, server_default=default, nullable=False)


_CHECKS = (
    _ChangedCheck(
        "precision",
        "precision IN ('fp32', 'bf16', 'fp16')",
        "precision IN ('fp32', 'bf16', 'fp16', 'fp8')",
    ),
    _ChangedCheck("zero_stage", "zero_stage IN (0, 1)", "zero_stage IN (0, 1, 2, 3)"),
)
_COLUMNS = (
    _NewColumn(
        "pipeline_split",
        sa.String(24),
        "'layers'",
        "pipeline_split IN ('layers', 'embedding', 'head', 'embedding_and_head')",
    ),
)


def upgrade() -> None:
    with _trials() as batch:
        for each in _COLUMNS:
            batch.add_column(each.column())
        for check in _CHECKS:
            batch.drop_constraint(op.f(f"ck_trials_{check.name}"), type_="check")
            batch.create_check_constraint(op.f(f"ck_trials_{check.name}"), check.after)


def downgrade() -> None:
    with _trials(is_upgraded=True) as batch:
        for check in _CHECKS:
            batch.drop_constraint(op.f(f"ck_trials_{check.name}"), type_="check")
            batch.create_check_constraint(op.f(f"ck_trials_{check.name}"), check.before)
        for each in _COLUMNS:
            batch.drop_column(each.name)


@contextmanager
def _trials(*, is_upgraded: bool = False) -> Iterator[Any]:
    """Changes the table at once: SQLite writes a new one, and refuses to while it has triggers."""
    connection, triggers = op.get_bind(), {}
    if connection.dialect.name == "sqlite":
        query = "SELECT name, sql FROM sqlite_master WHERE type = 'trigger'"
        triggers = dict(map(tuple, connection.exec_driver_sql(query)))
    for name in triggers:
        op.execute(f"DROP TRIGGER {name}")
    with op.batch_alter_table("trials", copy_from=_described(is_upgraded=is_upgraded)) as batch:
        yield batch
    for sql in triggers.values():
        op.execute(sql)


def _described(*, is_upgraded: bool) -> sa.Table:
    """The table as r003 or this revision leaves it; r002 and r003 drop a column with its check."""
    trials = SCHEMA.tables["trials"].to_metadata(sa.MetaData())
    reasons = "repeat_reason IN ('best', 'tie', 'doubted', 'disturbed', 'request')"
    check = sa.CheckConstraint(reasons, op.f("ck_trials_repeat_reason"))
    trials.append_column(sa.Column("repeat_reason", sa.String(16), check))
    for column in _COLUMNS if is_upgraded else ():
        trials.append_column(column.column())
    return trials

"""Layouts and models of today.

Context parallelism, other splits of pipelines, ZeRO stages 2 and 3, fp8, and how evenly the tokens
of probes were routed to experts.

Revision: r004, after r003. Earlier trials have the defaults of the new columns, and spend no time
on context parallelism; earlier models have no experts.
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
    """A column of trials that is added, with a check of its own unless its condition is empty."""

    name: str
    type: sa.types.TypeEngine[Any]
    default: str
    condition: str = ""

    def column(self) -> sa.Column[Any]:
        check = sa.CheckConstraint(self.condition, op.f(f"ck_trials_{self.name}"))
        return sa.Column(
            self.name,
            self.type,
            *([check] if self.condition else []),
            server_default=sa.text(self.default),
            nullable=False,
        )


_CHECKS = (
    _ChangedCheck(
        "layout_counts",
        "num_nodes >= 1 AND tp >= 1 AND pp >= 1 AND dp >= 1 AND vpp >= 1 AND "
        "micro_batch_size >= 1 AND num_microbatches >= 1 AND zero_replicas >= 1",
        "num_nodes >= 1 AND tp >= 1 AND cp >= 1 AND pp >= 1 AND dp >= 1 AND vpp >= 1 AND "
        "micro_batch_size >= 1 AND num_microbatches >= 1 AND zero_replicas >= 1",
    ),
    _ChangedCheck("num_devices", "num_devices = tp * pp * dp", "num_devices = tp * cp * pp * dp"),
    _ChangedCheck(
        "precision",
        "precision IN ('fp32', 'bf16', 'fp16')",
        "precision IN ('fp32', 'bf16', 'fp16', 'fp8')",
    ),
    _ChangedCheck("zero_stage", "zero_stage IN (0, 1)", "zero_stage IN (0, 1, 2, 3)"),
)
_COLUMNS = (
    _NewColumn("cp", sa.Integer(), "1"),
    _NewColumn(
        "cp_comm_type",
        sa.String(16),
        "'all_gather'",
        "cp_comm_type IN ('all_gather', 'p2p', 'a2a')",
    ),
    _NewColumn(
        "pipeline_split",
        sa.String(24),
        "'layers'",
        "pipeline_split IN ('layers', 'embedding', 'head', 'embedding_and_head')",
    ),
)
_OF_MEASUREMENTS: tuple[tuple[str, sa.types.TypeEngine[Any]], ...] = (
    ("balanced_routing", sa.Boolean()),
    ("expert_load", sa.Double()),
)


def upgrade() -> None:
    with _trials() as batch:
        for each in _COLUMNS:
            batch.add_column(each.column())
        for check in _CHECKS:
            batch.drop_constraint(op.f(f"ck_trials_{check.name}"), type_="check")
            batch.create_check_constraint(op.f(f"ck_trials_{check.name}"), check.after)
    for name, kind in _OF_MEASUREMENTS:
        op.add_column("measurements", sa.Column(name, kind))
    part = sa.Column[float]("cp_s", sa.Double(), server_default="0", nullable=False)
    op.add_column("breakdowns", part)


def downgrade() -> None:
    op.drop_column("breakdowns", "cp_s")
    for name, _ in reversed(_OF_MEASUREMENTS):
        op.drop_column("measurements", name)
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

"""Context parallelism: its degree, its communication, and its part of a step's time.

Earlier trials have cp=1 and spend no time on it.

Revision: r006, after r004.
"""

import sqlalchemy as sa
from alembic import op

revision = "r006"
down_revision = "r004"
branch_labels = None
depends_on = None

_COMM_TYPES = "('all_gather', 'p2p', 'a2a')"
_ADDED = (
    ("cp", "INTEGER DEFAULT '1' NOT NULL"),
    (
        "cp_comm_type",
        "VARCHAR(16) DEFAULT 'all_gather' NOT NULL CONSTRAINT ck_trials_cp_comm_type CHECK "
        f"(cp_comm_type IN {_COMM_TYPES})",
    ),
)
"""Columns of trials. The check of words is part of its column (see r002)."""

_CHECKS = {
    "layout_counts": (
        "num_nodes >= 1 AND tp >= 1 AND pp >= 1 AND dp >= 1 AND vpp >= 1 AND "
        "micro_batch_size >= 1 AND num_microbatches >= 1 AND zero_replicas >= 1",
        "num_nodes >= 1 AND tp >= 1 AND cp >= 1 AND pp >= 1 AND dp >= 1 AND vpp >= 1 AND "
        "micro_batch_size >= 1 AND num_microbatches >= 1 AND zero_replicas >= 1",
    ),
    "num_devices": ("num_devices = tp * pp * dp", "num_devices = tp * cp * pp * dp"),
}
"""Checks of trials, before and after."""


def upgrade() -> None:
    for column, kind in _ADDED:
        op.execute(f"ALTER TABLE trials ADD COLUMN {column} {kind}")
    for name, (before, after) in _CHECKS.items():
        _change_check(name, before, after)
    part = sa.Column[float]("cp_s", sa.Double(), server_default="0", nullable=False)
    op.add_column("breakdowns", part)


def downgrade() -> None:
    op.drop_column("breakdowns", "cp_s")
    for name, (before, after) in _CHECKS.items():
        _change_check(name, after, before)
    for column, _ in reversed(_ADDED):
        op.execute(f"ALTER TABLE trials DROP COLUMN {column}")


def _change_check(name: str, old: str, new: str) -> None:
    """Replaces the condition of a check of trials.

    SQLite can do so by rebuilding the table only, after which the checks of the columns of earlier
    revisions would be the table's, and their downgrades would fail. The text of its schema is
    changed instead (sqlite.org/lang_altertable.html, section 7): a check changes no row.
    """
    connection = op.get_bind()
    if connection.dialect.name != "sqlite":
        op.drop_constraint(op.f(f"ck_trials_{name}"), "trials", type_="check")
        op.create_check_constraint(op.f(f"ck_trials_{name}"), "trials", new)
        return
    version = connection.scalar(sa.text("PRAGMA schema_version"))
    connection.execute(sa.text("PRAGMA writable_schema = ON"))
    change = sa.text(
        "UPDATE sqlite_master SET sql = replace(sql, :old, :new) WHERE name = 'trials'"
    )
    connection.execute(change, {"old": f"CHECK ({old})", "new": f"CHECK ({new})"})
    connection.execute(sa.text(f"PRAGMA schema_version = {version + 1}"))
    connection.execute(sa.text("PRAGMA writable_schema = OFF"))

"""Tensor columns, a factor of the devices of a layout, and room for longer keys of layouts.

Revision: r006, after r005. Earlier trials have one column.
"""

import sqlalchemy as sa
from alembic import op

revision = "r006"
down_revision = "r005"
branch_labels = None
depends_on = None

_TABLES_WITH_KEYS = ("trials", "knob_steps")
_DEVICES = "num_devices = tp * cp * pp * dp"
_DEVICES_WITH_COLUMNS = "num_devices = tp * tp_columns * cp * pp * dp"


def upgrade() -> None:
    check = "CONSTRAINT ck_trials_tp_columns CHECK (tp_columns >= 1)"
    op.execute(f"ALTER TABLE trials ADD COLUMN tp_columns INTEGER DEFAULT 1 NOT NULL {check}")
    _replace_check(_DEVICES, _DEVICES_WITH_COLUMNS)
    _limit_keys(240)


def downgrade() -> None:
    _limit_keys(200)
    _replace_check(_DEVICES_WITH_COLUMNS, _DEVICES)
    op.execute("ALTER TABLE trials DROP COLUMN tp_columns")


def _replace_check(before: str, after: str) -> None:
    """Replaces the check of a trial's devices.

    SQLite has no statement for it. Its manual changes the stored text of the table, which is
    allowed for checks, since they do not change the format of the rows
    (https://www.sqlite.org/lang_altertable.html, section 7); the next version of the schema makes
    every connection read it again.
    """
    connection = op.get_bind()
    if connection.dialect.name != "sqlite":
        op.drop_constraint(op.f("ck_trials_num_devices"), "trials")
        op.create_check_constraint(op.f("ck_trials_num_devices"), "trials", after)
        return
    version = connection.exec_driver_sql("PRAGMA schema_version").scalar_one()
    connection.exec_driver_sql("PRAGMA writable_schema = ON")
    statement = "UPDATE sqlite_master SET sql = replace(sql, :before, :after) WHERE name = 'trials'"
    connection.execute(sa.text(statement), {"before": before, "after": after})
    connection.exec_driver_sql(f"PRAGMA schema_version = {version + 1}")
    connection.exec_driver_sql("PRAGMA writable_schema = OFF")


def _limit_keys(length: int) -> None:
    """Sets the length of layout keys; SQLite checks none, and would have to write new tables."""
    if op.get_bind().dialect.name == "sqlite":
        return
    for table in _TABLES_WITH_KEYS:
        op.execute(f"ALTER TABLE {table} ALTER COLUMN layout_key TYPE VARCHAR({length})")

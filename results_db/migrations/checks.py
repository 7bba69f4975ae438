"""Check constraints that a migration changes: on SQLite without building the table anew."""

from __future__ import annotations

import re
from collections.abc import Mapping

import sqlalchemy as sa
from alembic import op

from layout_tuner.results_db.errors import DatabaseInvalidError


def set_checks(table: str, checks: Mapping[str, str | None]) -> None:
    """Sets check constraints of a table by their names; None drops one.

    SQLite keeps a table's statement as it was written, and has no ALTER for constraints. The
    statement is changed where it is kept, as https://sqlite.org/lang_altertable.html (section 7)
    allows for constraints: a new table would lose its triggers, and the rows that refer to it.
    """
    if op.get_bind().dialect.name != "sqlite":
        for name, condition in checks.items():
            op.execute(f"ALTER TABLE {table} DROP CONSTRAINT IF EXISTS {name}")
            if condition is not None:
                op.execute(f"ALTER TABLE {table} ADD CONSTRAINT {name} CHECK ({condition})")
        return
    connection = op.get_bind()
    where = f"FROM sqlite_master WHERE type = 'table' AND name = '{table}'"
    statement: str = connection.exec_driver_sql(f"SELECT sql {where}").scalar_one()
    for name, condition in checks.items():
        # A condition has no parentheses but those of its lists.
        known = rf",\s*CONSTRAINT {name} CHECK \((?:[^()]|\([^()]*\))*\)"
        statement = re.sub(known, "", statement)
        if condition is not None:
            statement = (
                f"{statement.rstrip()[:-1].rstrip()}, \n\tCONSTRAINT {name} CHECK ({condition})\n)"
            )
    connection.exec_driver_sql("PRAGMA writable_schema = ON")
    connection.exec_driver_sql(
        "UPDATE sqlite_master SET sql = ? WHERE type = 'table' AND name = ?", (statement, table)
    )
    connection.exec_driver_sql("PRAGMA writable_schema = RESET")


def refuse_rows(table: str, column: str, condition: str) -> None:
    """Refuses to downgrade where a row has what the earlier version lacks.

    Raises:
        DatabaseInvalidError: a row fulfils the condition.
    """
    query = f"SELECT min({column}) FROM {table} WHERE {condition}"  # noqa: S608
    if found := op.get_bind().scalar(sa.text(query)):
        raise DatabaseInvalidError(
            f"{table} have {column}={found}, which the earlier version lacks: delete their "
            "campaigns, or restore a backup of that version"
        )

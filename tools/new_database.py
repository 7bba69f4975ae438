"""Writes the statements of a new SQLite database, which the service runs in place of migrations.

Run as `python -m tools.new_database` after a change of a migration.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from layout_tuner.results_db.migrations import migrate


def statements() -> str:
    """What the migrations make of an empty database, with its revision in front."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new.db"
        migrate.upgrade(f"sqlite:///{path}", migrate.head())
        with closing(sqlite3.connect(path)) as database:
            dumped = list(database.iterdump())[1:-1]  # without BEGIN and COMMIT
    # The migrations make several indexes in no order of their own.
    made = sorted(dumped, key=lambda line: line if " INDEX " in line.partition("(")[0] else "")
    return "\n\n".join([f"-- {migrate.head()}", *made]) + "\n"


if __name__ == "__main__":
    migrate.NEW_SQLITE.write_text(statements())

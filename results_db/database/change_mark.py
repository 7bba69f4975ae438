"""Whether a SQLite database was changed, and whether there is work in it, in microseconds.

Loops that look for work every fraction of a second ask here first: with SQLAlchemy, a query that
finds nothing takes a hundred times as long, and an idle service would need a core's percents.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Self

from layout_tuner.results_db.database.database import Database

RUNNING_CAMPAIGN: Final = "SELECT 1 FROM campaigns WHERE state = 'RUNNING' LIMIT 1"
WAITING_PLAN: Final = "SELECT 1 FROM plans WHERE state = 'WAITING' LIMIT 1"
RUNNING_TRIAL: Final = "SELECT 1 FROM trials WHERE state = 'RUNNING' LIMIT 1"
WAITING_TRIAL: Final = """
    SELECT 1 FROM trials JOIN campaigns ON campaigns.id = trials.campaign_id
    WHERE trials.state = 'PENDING' AND campaigns.state = 'RUNNING' LIMIT 1
"""
OPEN_TRIALS: Final = """
    SELECT count(*) FROM campaigns JOIN trials ON trials.campaign_id = campaigns.id
    WHERE trials.state IN ('PENDING', 'RUNNING') AND campaigns.state = 'RUNNING'
"""
OPEN_SESSION: Final = "SELECT 1 FROM workers WHERE id = ? AND ended_at IS NULL"
"""Of a worker, by the session's id."""

_VERSION: Final = "PRAGMA data_version"


class ChangeMark:
    """Detects commits to a SQLite database since the last call.

    It has a connection of its own, to which commits of all others show, of this process and of
    other ones. A look takes some microseconds, never waits for a writer, and may be made on an
    event loop. For one thread.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._seen: int | None = None

    @classmethod
    def of(cls, database: Database) -> Self | None:
        """The mark of a database; None: it is a PostgreSQL, which has to be queried."""
        path = database.engine.url.database
        if database.is_shared or not path:
            return None
        return cls(Path(path))

    def has_changed(self) -> bool:
        """Whether there was a commit since the last call; True where that is unknown."""
        version = self._first(_VERSION, unknown=None)
        changed, self._seen = version is None or version != self._seen, version
        return bool(changed)

    def finds(self, query: str, *parameters: str) -> bool:
        """Whether a query has a result; True where that is unknown."""
        return self._first(query, *parameters, unknown=True) is not None

    def count(self, query: str) -> int:
        """What a query counts; 0 where that is unknown."""
        return int(self._first(query, unknown=0))

    def _first(self, query: str, *parameters: str, unknown: Any) -> Any:
        """The first value of a result; None: there is none; `unknown`: the database is not read."""
        try:
            if self._connection is None:
                # Without creating a file: a lost database must be reported by who reads it.
                self._connection = sqlite3.connect(
                    f"{self._path.absolute().as_uri()}?mode=rw",
                    uri=True,
                    timeout=0.0,
                    isolation_level=None,
                    check_same_thread=False,
                )
                self._seen = None
            row = self._connection.execute(query, parameters).fetchone()
        except sqlite3.Error:
            self.close()
            return unknown
        return None if row is None else row[0]

    def close(self) -> None:
        """Closes the connection; the next look opens another."""
        if self._connection is not None:
            with closing(self._connection):
                self._connection = None

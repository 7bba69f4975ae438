"""The time by the database's server, on which all processes of a service agree."""

from __future__ import annotations

import time
from datetime import datetime, timedelta

from sqlalchemy import func, select

from results_db.session import Database


class DatabaseClock:
    """What the server's clock shows, going by our own count since it was last asked.

    Leases are written by one process and looked at by another, on another machine: by their own clocks, one
    that is ahead would take the leases of the other's workers. Nor does a clock that is set meanwhile matter.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._told = self._ask()

    def __call__(self) -> datetime:
        """The time; nothing is asked for it."""
        told_at, count = self._told
        return told_at + timedelta(seconds=time.monotonic() - count)

    def ask(self) -> None:
        """Asks the server anew; in between, the machine may have been asleep, and its count stood still.

        Raises:
            DatabaseUnavailableError: it does not answer; the time goes on as it did.
        """
        self._told = self._ask()

    def _ask(self) -> tuple[datetime, float]:
        with self._database.read() as session:
            before = time.monotonic()
            told_at = session.execute(select(func.clock_timestamp())).scalar_one()
            return told_at, (before + time.monotonic()) / 2

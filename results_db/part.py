"""What every part of the store stands on: a database and a clock."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from results_db.session import Database

Clock = Callable[[], datetime]
"""Tells the time, aware; tests turn it forward."""


def utc_now() -> datetime:
    """The time, in UTC."""
    return datetime.now(UTC)


class StorePart:
    """One meaning of the store: campaigns, trials, workers, leases, ..."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._db = database
        self._clock = clock

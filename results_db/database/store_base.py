"""The base of every section of the store: a database, a clock and an actor."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Self, TypeVar

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from layout_tuner.results_db.actor import SYSTEM, Actor
from layout_tuner.results_db.database.audit_log import write_entry
from layout_tuner.results_db.database.database import Database


class DatabaseClock:
    """The clock of the database server, advanced by the local monotonic clock between queries.

    Processes on different machines write and check the same leases. If each used its own clock, a
    process whose clock is ahead would expire the leases of the others.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.ask()

    def __call__(self) -> datetime:
        """The time, without a query."""
        server_time, count = self._read_at
        return server_time + timedelta(seconds=time.monotonic() - count)

    def ask(self) -> None:
        """Queries the server again: the local count stops while the machine sleeps.

        Raises:
            DatabaseUnavailableError: it does not answer; the clock continues as before.
        """
        with self._database.read() as session:
            before = time.monotonic()
            server_time = session.execute(select(func.clock_timestamp())).scalar_one()
            self._read_at: tuple[datetime, float] = server_time, (before + time.monotonic()) / 2


T = TypeVar("T")

Clock = Callable[[], datetime]
"""Returns the time, with a time zone; tests replace it."""


class StoreSection:
    """The base of a section of the store."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._db = database
        self._clock = clock
        self._actor = SYSTEM

    def bound_to(self, database: Database, actor: Actor) -> Self:
        """The same section, with its caches, on a database and for an actor."""
        other = object.__new__(type(self))  # copy.copy takes ten times as long
        vars(other).update(vars(self))
        other._db, other._actor = database, actor
        return other

    def _scalar(self, query: Select[T]) -> T | None:
        """The first value that a query selects, in a transaction of its own; None: no row."""
        with self._db.read() as session:
            return session.scalar(query)

    def _audit(
        self, session: Session, action: str, target_kind: str, target: str | int, **details: Any
    ) -> None:
        """Writes an entry of the audit log, in the transaction of the change."""
        write_entry(session, self._actor, self._clock(), action, target_kind, target, details)

"""Connections and transactions: each has a session of its own, and what fails has one meaning."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from sqlalchemy import Engine, event
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    StatementError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

from results_db import postgresql, sqlite
from results_db.database_url import shown_url
from results_db.errors import (
    DatabaseConflictError,
    DatabaseUnavailableError,
    ResultsDbError,
    ValueUnstorableError,
)
from results_db.events import write_events
from results_db.storable import refuse_unstorable

FirstStatement = Callable[[Session], None]
"""What a writing transaction begins with; raising something ends it before it has written."""


def make_engine(url: str) -> Engine:
    """An engine for the database at a URL, with nothing connected yet.

    Raises:
        DatabaseUrlInvalidError: it is no address of a database that we know.
    """
    is_sqlite = url.startswith("sqlite")
    engine = sqlite.make_engine(url) if is_sqlite else postgresql.make_engine(url)
    refuse_unstorable(engine)
    return engine


class Database:
    """Where transactions come from: one at a time, each with its own session."""

    def __init__(self, url: str) -> None:
        self.engine = make_engine(url)
        kind = sqlite if self.engine.dialect.name == "sqlite" else postgresql
        self._reader = self.engine.execution_options(**kind.READS)
        self._writer = self.engine.execution_options(**kind.WRITES)
        self._first: FirstStatement | None = None

    @property
    def is_shared(self) -> bool:
        """Whether processes of other machines may work on it."""
        return self.engine.dialect.name != "sqlite"

    def beginning_with(self, first: FirstStatement) -> Self:
        """The same database, whose writing transactions all begin with this."""
        other = copy.copy(self)
        other._first = first
        return other

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent view; what is changed in it is thrown away."""
        with _usable(self.engine), Session(self._reader) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that commits at the end, or rolls back when something is raised."""
        with _usable(self.engine), Session(self._writer) as session, session.begin():
            if self._first is not None:
                self._first(session)
            yield session
            write_events(session)

    def close(self) -> None:
        """Closes every connection; one that a thread still uses, when it is done with it."""
        event.listen(self.engine.pool, "checkin", _close_connection)
        self.engine.dispose()


def _close_connection(_connection: Any, record: ConnectionPoolEntry) -> None:
    record.close()


def breaks_unique(error: IntegrityError, table: str, *columns: str) -> bool:
    """Whether a statement failed because these columns are unique together, and nothing else."""
    diagnostics = getattr(error.orig, "diag", None)
    if diagnostics is not None:
        # PostgreSQL names the constraint; `models.Base` gives it its name.
        return bool(diagnostics.constraint_name == f"uq_{table}_{'_'.join(columns)}")
    named = ", ".join(f"{table}.{column}" for column in columns)
    return str(error.orig) == f"UNIQUE constraint failed: {named}"


@contextmanager
def _usable(engine: Engine) -> Iterator[None]:
    """Locked for too long, disk full, no database at all: whatever is not the statement's own fault."""
    try:
        yield
    except IntegrityError:
        raise
    except PoolTimeoutError as error:
        raise DatabaseUnavailableError(
            f"the database {shown_url(engine.url)} is busy: all connections of this process are in use"
        ) from error
    except DBAPIError as error:
        raise _meaning(engine, error) from error
    except StatementError as error:
        if isinstance(error.orig, ResultsDbError):
            raise error.orig from error
        raise


def _meaning(engine: Engine, error: DBAPIError) -> ResultsDbError:
    name = shown_url(engine.url)
    if engine.dialect.name == "sqlite":
        return DatabaseUnavailableError(
            f"the database {name} cannot be used: {sqlite.words(error)}"
        )
    words = postgresql.words(error)
    if isinstance(error, DataError):
        return ValueUnstorableError(f"the database cannot keep this: {words}")
    if postgresql.is_conflict(error):
        return DatabaseConflictError(f"the database {name} gave up on this: {words}; try again")
    return DatabaseUnavailableError(f"the database {name} cannot be used: {words}")

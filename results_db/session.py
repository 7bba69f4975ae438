"""Connections and transactions; the one place that knows which database it talks to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from results_db.database_url import postgresql_url
from results_db.errors import DatabaseUnavailableError

BUSY_TIMEOUT_S: Final = 15.0
"""Seconds that a writer waits for another on SQLite before it gives up."""

POOL_SIZE: Final = 32
"""Connections that are kept; twice as many may be open, more than the service has threads."""

POSTGRES_POOL_SIZE: Final = 10
"""Connections to PostgreSQL that a process keeps; twice as many may be open."""

_WRITES: Final = "layout_tuner_writes"


def make_engine(url: str) -> Engine:
    """An engine whose transactions are real ones on SQLite too.

    The sqlite3 module starts transactions late and only for some statements; here it is told to
    leave them alone, and every transaction begins explicitly: IMMEDIATE where it will write, so that
    two writers queue for the lock instead of failing half way with "database is locked".
    """
    if make_url(url).get_backend_name() != "sqlite":
        return create_engine(postgresql_url(url), pool_pre_ping=True, pool_size=POSTGRES_POOL_SIZE)
    engine = create_engine(
        url,
        connect_args={"timeout": BUSY_TIMEOUT_S},
        pool_size=POOL_SIZE,
        max_overflow=POOL_SIZE,
    )
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
    cursor.execute("PRAGMA journal_mode = WAL")
    # FULL: a power cut must not undo an outcome that a worker was told is safe.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


class Database:
    """Where transactions come from: one at a time, each with its own session."""

    def __init__(self, url: str) -> None:
        self.engine = make_engine(url)
        self._writer = self.engine.execution_options(**{_WRITES: True})

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent view; what is changed in it is thrown away."""
        with _usable(self.engine), Session(self.engine) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that commits at the end, or rolls back when something is raised."""
        with _usable(self.engine), Session(self._writer) as session, session.begin():
            yield session

    def close(self) -> None:
        """Closes every connection."""
        self.engine.dispose()


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
    except DBAPIError as error:
        raise DatabaseUnavailableError(
            f"the database {engine.url.database} cannot be used: {error.orig}"
        ) from error

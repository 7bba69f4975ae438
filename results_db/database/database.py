"""Connections and transactions: each has its own session, and database errors become our own."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from typing import Any, Final, Self, cast

from sqlalchemy import CursorResult, Delete, Engine, event
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    MultipleResultsFound,
    StatementError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from layout_tuner.protocol.connection.outage_log import OutageLog
from layout_tuner.results_db.database import postgresql, sqlite
from layout_tuner.results_db.database.events import write_events
from layout_tuner.results_db.database.storable_values import refuse_unstorable
from layout_tuner.results_db.database.url import shown_url
from layout_tuner.results_db.errors import (
    DatabaseConflictError,
    DatabaseUnavailableError,
    ResultsDbError,
    ValueUnstorableError,
)

SETTLED_AFTER_S: Final = 0.5
"""An outage ends after so long without a failure: a stopping server closes its connections one by
one."""

_log: Final = logging.getLogger(__name__)

EYES_OF: Final = "owners"
"""In the `info` of a session: its queries find the campaigns that all of these owners may see."""

HALF_LIFE: Final = "half_life_s"
"""In the `info` of a session, the seconds in which recent use of owners halves."""

DEFAULT_HALF_LIFE_S: Final = 7 * 86_400.0
"""As Slurm's PriorityDecayHalfLife."""

FirstStatement = Callable[[Session], None]
"""Runs at the start of a writing transaction; if it raises, nothing is written."""


class Database:
    """Opens transactions, each with its own session."""

    def __init__(self, url: str) -> None:
        """Prepares an engine without connecting; DatabaseUrlInvalidError for a URL of no use."""
        kind = sqlite if url.startswith("sqlite") else postgresql
        self.engine: Engine = kind.make_engine(url)
        refuse_unstorable(self.engine)
        self._reader = self.engine.execution_options(**kind.READS)
        self._writer = self.engine.execution_options(**kind.WRITES)
        self._first: FirstStatement | None = None
        self.owners: tuple[str, ...] = ()
        self._outage: OutageLog | None = None
        self.half_life_s = DEFAULT_HALF_LIFE_S

    @property
    def is_shared(self) -> bool:
        """Whether processes on other machines may use it."""
        return self.engine.dialect.name != "sqlite"

    def beginning_with(self, first: FirstStatement) -> Self:
        """The same database, whose writing transactions begin with `first`."""
        other = copy.copy(self)
        other._first = first
        return other

    def seen_by(self, *owners: str | None) -> Self:
        """The same database, in which queries find what all of these owners may see; None: all."""
        other = copy.copy(self)
        other.owners = tuple(each for each in owners if each is not None)
        return other

    def log_outages(self) -> None:
        """Logs outages from now on; for processes that continue after a failed transaction."""
        self._outage = OutageLog(
            _log,
            f"the database {shown_url(self.engine.url)}",
            most_reasons=1,
            settled_after_s=SETTLED_AFTER_S,
        )

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A consistent view; changes in it are discarded."""
        with self._usable(writes=False), Session(self._reader, info=self._info()) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction that commits at the end, or rolls back on an exception."""
        session = Session(self._writer, info=self._info())
        with self._usable(writes=True), session, session.begin():
            if self._first is not None:
                self._first(session)
            yield session
            write_events(session)

    def _info(self) -> dict[str, Any]:
        return {HALF_LIFE: self.half_life_s, EYES_OF: self.owners}

    @contextmanager
    def _usable(self, *, writes: bool) -> Iterator[None]:
        """Reports to the outage log whether the database could be used.

        On a full disk only writing fails; then only a successful write ends the outage.
        """
        part = "writing" if writes else "reading"
        try:
            with _translated_errors(self.engine):
                yield
        except DatabaseConflictError:
            raise
        except DatabaseUnavailableError as error:
            if self._outage is not None:
                self._outage.failed(str(error), part=part)
                error.is_logged = True
            raise
        if self._outage is not None:
            self._outage.worked(part)

    def close(self) -> None:
        """Closes all connections; those in use are closed when they are returned."""
        event.listen(self.engine.pool, "checkin", lambda _connection, record: record.close())
        self.engine.dispose()


def rows_deleted(session: Session, statement: Delete) -> int:
    """Runs a DELETE; returns the number of rows that it deleted."""
    done = session.execute(statement, execution_options={"synchronize_session": False})
    return cast("CursorResult[Any]", done).rowcount


@contextmanager
def refused_unless_unique(
    refusal: ResultsDbError, table: str, *columns: str, only: str = ""
) -> Iterator[None]:
    """Raises the refusal if a statement fails because these columns must be unique together.

    `only` names the rows of a constraint that is on some rows.
    """
    try:
        yield
    except IntegrityError as error:
        if (diagnostics := getattr(error.orig, "diag", None)) is not None:
            # PostgreSQL names the constraint; `models.Base` gives it its name.
            name = "_".join(filter(None, ("uq", table, *columns, only)))
            is_broken = diagnostics.constraint_name == name
        else:
            named = ", ".join(f"{table}.{column}" for column in columns)
            is_broken = str(error.orig) == f"UNIQUE constraint failed: {named}"
        if is_broken:
            raise refusal from error
        raise


@contextmanager
def _translated_errors(engine: Engine) -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise
    except PoolTimeoutError as error:
        raise DatabaseUnavailableError(
            f"the database {shown_url(engine.url)} is busy: all connections of this process are in use"
        ) from error
    except DBAPIError as error:
        raise _translated(engine, error) from error
    except (UnicodeDecodeError, JSONDecodeError, MultipleResultsFound) as error:
        # SQLite quotes a damaged name, or a document or a key that is unique is damaged.
        raise DatabaseUnavailableError(
            f"the database {shown_url(engine.url)} cannot be used: {error}; it is damaged, restore "
            "the last good backup with `layout-tuner db restore`"
        ) from error
    except StatementError as error:
        if isinstance(error.orig, ResultsDbError):
            raise error.orig from error
        raise


def _translated(engine: Engine, error: DBAPIError) -> ResultsDbError:
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
    return DatabaseUnavailableError(
        f"the database {name} cannot be used: {words}", is_away=postgresql.is_away(error)
    )

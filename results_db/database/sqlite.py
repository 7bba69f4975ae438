"""SQLite: one file, one writer at a time, many readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError

from layout_tuner.results_db.database.storable_values import read_document, write_document

BUSY_TIMEOUT_S: Final = 15.0
"""Seconds that a writer waits for another before it gives up."""

POOL_SIZE: Final = 32
"""Connections that are kept open; at most twice as many exist, more than the service has
threads."""

_WRITES: Final = "layout_tuner_writes"
READS: Final[Mapping[str, Any]] = {_WRITES: False}
"""Execution options of an engine that reads."""
WRITES: Final[Mapping[str, Any]] = {_WRITES: True}
"""Execution options of an engine that writes."""


_ADVICE: Final[Mapping[str, str]] = {
    "malformed": "it is damaged: look at it with `layout-tuner db check`, and restore the last good "
    "backup with `layout-tuner db restore`",
    "not a database": "restore a backup with `layout-tuner db restore`",
    "disk is full": "free space on its disk",
    "disk I/O error": "look at its disk: it is full, gone or failing",
    "locked": f"another process has held it for {BUSY_TIMEOUT_S:.0f} s: wait for it, or end it",
    "readonly": "let this user write to it and to its folder",
}
"""Advice, by words of SQLite's messages."""


def words(error: DBAPIError) -> str:
    """SQLite's message, with advice where there is some."""
    said = str(error.orig)
    advice = next((advice for sign, advice in _ADVICE.items() if sign in said), None)
    return said if advice is None else f"{said}; {advice}"


def make_engine(url: str) -> Engine:
    """An engine whose transactions begin explicitly.

    The sqlite3 module would start transactions late, and only for some statements. Here every
    transaction begins explicitly; IMMEDIATE if it will write, so that two writers queue for the
    lock instead of failing half way with "database is locked".
    """
    engine = create_engine(
        url,
        connect_args={"timeout": BUSY_TIMEOUT_S},
        pool_size=POOL_SIZE,
        max_overflow=POOL_SIZE,
        hide_parameters=True,
        json_serializer=write_document,
        json_deserializer=read_document,
    )
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    return engine


def _prepare(connection: Any, _record: object) -> None:
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}")
    cursor.execute("PRAGMA journal_mode = WAL")
    # FULL: a power failure must not undo an outcome that was confirmed to a worker.
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

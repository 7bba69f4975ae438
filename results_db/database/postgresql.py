"""PostgreSQL: how it is connected to, for how long it is waited for, and what its refusals mean."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, InvalidatePoolError

from results_db.database_url import postgresql_url
from results_db.errors import DatabaseUnavailableError

CONNECT_TIMEOUT_S: Final = 5
STATEMENT_TIMEOUT_S: Final = 30
LOCK_TIMEOUT_S: Final = 15
"""As long as a writer waits for another on SQLite."""
IDLE_IN_TRANSACTION_S: Final = 15
"""After so long in the middle of a transaction a process is taken to be stopped: its locks are freed."""
SILENCE_S: Final = 25
"""After so long without a sign of the server's machine a connection is given up."""

POOL_SIZE: Final = 10
"""Connections that a process keeps; twice as many may be open."""
POOL_TIMEOUT_S: Final = 15.0
RECYCLE_S: Final = 1800
ASKED_AFTER_S: Final = 2.0
"""A connection that lay idle for longer is asked whether it still stands before it is used."""

OLDEST_VERSION: Final = 13

READS: Final[Mapping[str, Any]] = {
    "isolation_level": "REPEATABLE READ",
    "postgresql_readonly": True,
}
"""Execution options of an engine that reads: all statements of a transaction see one state."""
WRITES: Final[Mapping[str, Any]] = {}
"""Execution options of an engine that writes: rows are locked before they are changed."""

_CONFLICTS: Final = ("40001", "40P01")
"""Serialisation failure and deadlock: nothing was done, and the same may be tried again."""

_ADVICE: Final[Mapping[str, str]] = {
    "28P01": "give the right password in ~/.pgpass, $PGPASSWORD or the URL",
    "28000": "let this user in with pg_hba.conf, or name another user in the URL",
    "3D000": "create it with createdb, or name another in the URL",
    "42501": "let this user create tables: GRANT CREATE, USAGE ON SCHEMA public TO ...",
    "42P01": "the schema is not that of this version: layout-tuner db upgrade",
    "53300": "raise its max_connections, or run fewer processes",
    "53100": "free space on its disk",
    "25006": "name its primary in the URL: this one takes no writes",
    "55P03": f"another process has held a lock for {LOCK_TIMEOUT_S} s",
    "57014": f"a statement took more than {STATEMENT_TIMEOUT_S} s",
    "57P03": "it is starting or stopping; wait for it",
}
"""What to do, by SQLSTATE."""

_SIGNS: Final[Mapping[str, str]] = {
    "password authentication failed": "28P01",
    "no password supplied": "28P01",
    "no pg_hba.conf entry": "28000",
    "does not exist": "3D000",
    "too many clients": "53300",
    "too many connections": "53300",
    "remaining connection slots": "53300",
    "starting up": "57P03",
    "shutting down": "57P03",
}
"""Words of refusals that come before a connection stands, which carry no SQLSTATE."""


def make_engine(url: str) -> Engine:
    """An engine whose waits all have an end.

    Raises:
        DatabaseUrlInvalidError: it is no address of a PostgreSQL.
    """
    engine = create_engine(
        postgresql_url(url),
        connect_args=_connect_args(),
        pool_size=POOL_SIZE,
        max_overflow=POOL_SIZE,
        pool_timeout=POOL_TIMEOUT_S,
        pool_recycle=RECYCLE_S,
        pool_use_lifo=True,
        hide_parameters=True,
    )
    event.listen(engine, "connect", _refuse_unsuitable, insert=True)
    event.listen(engine, "checkin", _note_use)
    event.listen(engine, "checkout", _ask_idle_one(engine))
    return engine


def words(error: DBAPIError) -> str:
    """What the server said, on one line, and what to do where that is known."""
    said = " ".join(str(error.orig).split("\n")[0].split())
    state = _sqlstate(error) or next((code for sign, code in _SIGNS.items() if sign in said), "")
    advice = _ADVICE.get(state)
    return said if advice is None else f"{said}; {advice}"


def is_conflict(error: DBAPIError) -> bool:
    """Whether transactions were in each other's way, and this one was undone for another's sake."""
    return _sqlstate(error) in _CONFLICTS


def _sqlstate(error: DBAPIError) -> str | None:
    return getattr(error.orig, "sqlstate", None)


def _connect_args() -> dict[str, Any]:
    settings = {
        "statement_timeout": f"{STATEMENT_TIMEOUT_S}s",
        "lock_timeout": f"{LOCK_TIMEOUT_S}s",
        "idle_in_transaction_session_timeout": f"{IDLE_IN_TRANSACTION_S}s",
        "timezone": "UTC",
    }
    return {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "application_name": "layout-tuner",
        "options": " ".join(f"-c {name}={value}" for name, value in settings.items()),
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": SILENCE_S * 1000,
    }


def _refuse_unsuitable(connection: Any, _record: object) -> None:
    """Refuses a server that is too old, and a database that cannot hold every text."""
    info = connection.info
    if info.server_version < OLDEST_VERSION * 10_000:
        raise DatabaseUnavailableError(
            f"the server is PostgreSQL {info.server_version // 10_000}; "
            f"{OLDEST_VERSION} or newer is needed"
        )
    encoding = info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise DatabaseUnavailableError(
            f"the database {info.dbname} has the encoding {encoding}, and UTF8 is needed: "
            "createdb --encoding UTF8 --template template0"
        )


def _note_use(_connection: Any, record: Any) -> None:
    record.info["used_at"] = time.monotonic()


def _ask_idle_one(engine: Engine) -> Any:
    def ask(connection: Any, record: Any, _proxy: object) -> None:
        used_at = record.info.get("used_at")
        if used_at is None or time.monotonic() - used_at < ASKED_AFTER_S:
            return
        try:
            alive = engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error:
            alive = False
        if not alive:
            # The others are as old: the server was away, and each would fail once.
            raise InvalidatePoolError

    return ask

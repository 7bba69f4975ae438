"""PostgreSQL: connections, timeouts, and the meaning of its errors."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError, InvalidatePoolError

from layout_tuner.results_db.database.storable_values import read_document, write_document
from layout_tuner.results_db.database.url import postgresql_url
from layout_tuner.results_db.errors import DatabaseUnavailableError

CONNECT_TIMEOUT_S: Final = 5

STATEMENT_TIMEOUT_S: Final = 30

LOCK_TIMEOUT_S: Final = 15
"""As long as on SQLite."""

IDLE_IN_TRANSACTION_S: Final = 15
"""A process that is idle in a transaction for longer is assumed stopped; its locks are released."""

SILENCE_S: Final = 25
"""A connection is closed if the server's machine is silent for longer."""

POOL_SIZE: Final = 10
"""Connections that a process keeps open; at most twice as many exist."""

POOL_TIMEOUT_S: Final = 15.0

RECYCLE_S: Final = 1800

TESTED_AFTER_S: Final = 2.0
"""A connection that was idle for longer is tested before it is used."""

OLDEST_VERSION: Final = 13

READS: Final[Mapping[str, Any]] = {
    "isolation_level": "REPEATABLE READ",
    "postgresql_readonly": True,
}
"""Execution options for reading: all statements of a transaction see one state."""

WRITES: Final[Mapping[str, Any]] = {}
"""Execution options for writing: rows are locked before they are changed."""

_CONFLICTS: Final = ("40001", "40P01")
"""Serialisation failure and deadlock: the transaction was rolled back and can be retried."""

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
"""Advice, by SQLSTATE."""

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
"""Words of errors while connecting, which have no SQLSTATE."""

_AWAY_STATES: Final = ("57P01", "57P02", "57P03", "08000", "08001", "08003", "08004", "08006")
"""Shut down, crashed, starting or stopping, and broken connections."""

_AWAY_SIGNS: Final = (
    "Connection refused",
    "No such file or directory",
    "starting up",
    "shutting down",
    "server closed the connection",
    "connection timeout expired",
    "Connection reset",
    "No route to host",
    "Network is unreachable",
    "the connection is lost",
)
"""Words of errors while connecting to a server that may answer later; they have no SQLSTATE."""


def make_engine(url: str) -> Engine:
    """An engine with a timeout for every wait; DatabaseUrlInvalidError as `postgresql_url`."""
    engine = create_engine(
        postgresql_url(url),
        connect_args=_connect_args(),
        pool_size=POOL_SIZE,
        max_overflow=POOL_SIZE,
        pool_timeout=POOL_TIMEOUT_S,
        pool_recycle=RECYCLE_S,
        pool_use_lifo=True,
        hide_parameters=True,
        json_serializer=write_document,
        json_deserializer=read_document,
    )
    event.listen(engine, "connect", _refuse_unsuitable, insert=True)
    event.listen(engine, "checkin", lambda _, record: record.info.update(used_at=time.monotonic()))
    event.listen(engine, "checkout", _check_idle_connection(engine))
    return engine


def words(error: DBAPIError) -> str:
    """The server's message on one line, with advice where there is some."""
    said = " ".join(str(error.orig).split("\n")[0].split())
    state = _sqlstate(error) or next((code for sign, code in _SIGNS.items() if sign in said), "")
    advice = _ADVICE.get(state)
    return said if advice is None else f"{said}; {advice}"


def is_away(error: DBAPIError) -> bool:
    """Whether the server is starting, stopping or unreachable, and may answer later.

    This is not so for a wrong password, an unknown database or an unknown host.
    """
    state = _sqlstate(error)
    if state is not None:
        return state in _AWAY_STATES
    said = str(error.orig)
    refused = any(sign in said for sign, code in _SIGNS.items() if code not in _AWAY_STATES)
    return not refused and any(sign in said for sign in _AWAY_SIGNS)


def is_conflict(error: DBAPIError) -> bool:
    """Whether the transaction was rolled back because of a conflict with another."""
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
    """Refuses a server that is too old, and a database whose encoding is not UTF8."""
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


def _check_idle_connection(engine: Engine) -> Any:
    def ask(connection: Any, record: Any, _proxy: object) -> None:
        used_at = record.info.get("used_at")
        if used_at is None or time.monotonic() - used_at < TESTED_AFTER_S:
            return
        try:
            alive = engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error:
            alive = False
        if not alive:
            # The server was away: all pooled connections are broken, and each would fail once.
            raise InvalidatePoolError

    return ask


MIGRATION_LOCK: Final = 0x6C74_6D69
"""PostgreSQL's advisory lock for changes of the schema."""

MIGRATION_PATIENCE_S: Final = 60
"""Seconds to wait for a process that changes the schema or uses a table."""


def lift_limits(connection: Connection) -> None:
    """Removes the timeouts of PostgreSQL for the statements of this transaction."""
    if connection.dialect.name == "sqlite":
        return
    connection.execute(text("SET LOCAL statement_timeout = 0"))
    connection.execute(text("SET LOCAL idle_in_transaction_session_timeout = 0"))
    connection.execute(text(f"SET LOCAL lock_timeout = '{MIGRATION_PATIENCE_S}s'"))


def take_migration_lock(connection: Connection) -> None:
    """Waits until no other process changes the schema; the lock ends with the transaction.

    On SQLite the transaction itself is the lock.
    """
    lift_limits(connection)
    if connection.dialect.name != "sqlite":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))

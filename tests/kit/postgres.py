"""A real PostgreSQL for tests: one server a session, a database for itself for every test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from benchmarks.service.postgres_server import PostgresServer, running_server
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.migrations import migrate
from layout_tuner.results_db.store import Store

TEMPLATE: Final = "upgraded"
"""A database with this version's schema, of which those of tests are copies."""


def is_anybody_waiting(server: PostgresServer, url: str) -> bool:
    """Whether somebody waits for a lock in the database at a URL."""
    database = url.split("@/")[1].split("?")[0]
    waiting = "wait_event_type = 'Lock' AND state = 'active'"
    ((count,),) = server.execute(
        f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{database}' AND {waiting}"
    )
    return bool(count)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """The session's server; it starts with the first test that wants it."""
    with running_server() as server:
        server.execute(f"CREATE DATABASE {TEMPLATE}")
        migrate.upgrade(server.url(TEMPLATE))
        yield server


_CATALOG: Final = "SELECT " + ", ".join(
    f"(SELECT sum(xmin::text::bigint) FROM {table})"
    for table in (
        *("pg_class", "pg_attribute", "pg_attrdef", "pg_constraint", "pg_index", "pg_proc"),
        *("pg_trigger", "pg_type", "pg_namespace"),
        "(SELECT xmin FROM pg_database WHERE datname = current_database()) AS own",
        "(SELECT s.xmin FROM pg_db_role_setting s JOIN pg_database d ON s.setdatabase = d.oid"
        " WHERE d.datname = current_database()) AS settings",
    )
)
"""Changes whenever something of the schema or the settings of a database changes."""

_SIZE_BYTES: Final = "SELECT pg_database_size(current_database())"
_MAX_GROWTH_BYTES: Final = 4 << 20
"""By how much a database may have grown to be emptied; deleted rows keep their place."""


class EmptyDatabases:
    """Databases of this version's schema, lent out one after the other.

    Creating a database copies five hundred files, emptying one deletes a few rows: those that come
    back are emptied. One whose schema or settings a test has changed is dropped instead.
    """

    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self._free: list[str] = []
        self._as_new: dict[str, tuple[object, int]] = {}
        """By database: its catalog and its size in bytes when it was new."""
        with closing(psycopg.connect(server.url(TEMPLATE))) as template:
            tables = _column(
                template, "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
            )
            sequences = _column(template, "SELECT sequencename FROM pg_sequences")
            rows = {
                table: _column(template, f"SELECT json_agg(t)::text FROM {table} t")[0]
                for table in tables
            }
        self._emptying = [
            "SET session_replication_role = replica",  # no trigger, and no order of the tables
            *(f"DELETE FROM {table}" for table in tables),
            *(
                f"INSERT INTO {table} SELECT * FROM json_populate_recordset(NULL::{table}, "
                f"'{found}')"
                for table, found in rows.items()
                if found is not None
            ),
            *(f"SELECT setval('{sequence}', 1, false)" for sequence in sequences),
        ]

    @contextmanager
    def lend(self) -> Iterator[str]:
        """URL of an empty database that the caller has for itself."""
        name = self._free.pop() if self._free else self._create()
        try:
            yield self._server.url(name)
        finally:
            if self._emptied(name):
                self._free.append(name)
            else:
                self._server.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def _emptied(self, name: str) -> bool:
        """Whether the database is now as it was when it was new."""
        with closing(psycopg.connect(self._server.url(name), autocommit=True)) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            catalog, size_bytes = _state(connection)
            catalog_then, size_bytes_then = self._as_new[name]
            if catalog != catalog_then or size_bytes > size_bytes_then + _MAX_GROWTH_BYTES:
                return False
            connection.execute("; ".join(self._emptying))  # type: ignore[call-overload]
            return True

    def _create(self) -> str:
        name = f"lent_{len(self._as_new)}"
        self._server.execute(f"CREATE DATABASE {name} TEMPLATE {TEMPLATE} STRATEGY FILE_COPY")
        with closing(psycopg.connect(self._server.url(name))) as connection:
            self._as_new[name] = _state(connection)
        return name


def _state(connection: psycopg.Connection) -> tuple[object, int]:
    (size_bytes,) = _column(connection, _SIZE_BYTES)
    return connection.execute(_CATALOG).fetchone(), int(size_bytes)  # type: ignore[call-overload]


def _column(connection: psycopg.Connection, query: str) -> list[Any]:
    return [value for (value,) in connection.execute(query)]  # type: ignore[call-overload]


@pytest.fixture(scope="session")
def empty_databases(postgres_server: PostgresServer) -> EmptyDatabases:
    """Lends out databases of the session's server."""
    return EmptyDatabases(postgres_server)


@pytest.fixture
def postgres_url(empty_databases: EmptyDatabases) -> Iterator[str]:
    """URL of a database of this version's schema that the test has for itself."""
    with empty_databases.lend() as url:
        yield url


@pytest.fixture
def empty_postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """URL of a database without any table that the test has for itself."""
    with postgres_server.database() as url:
        yield url


@cache
def _upgraded_sqlite() -> bytes:
    """The content of an empty SQLite database of this version's schema."""
    with tempfile.TemporaryDirectory() as folder:
        data_dir = DataDir(Path(folder))
        Store.open(data_dir).close()
        return _sqlite_file(data_dir).read_bytes()


def _sqlite_file(data_dir: DataDir) -> Path:
    return Path(data_dir.database_url.removeprefix("sqlite:///"))


def upgraded(path: Path) -> DataDir:
    """Makes a data directory with an upgraded database, without running the migrations again."""
    data_dir = DataDir(path)
    data_dir.create()
    data_dir.create_database()
    _sqlite_file(data_dir).write_bytes(_upgraded_sqlite())
    return data_dir


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """URL of an upgraded SQLite database that the test has for itself, in `tmp_path / "data"`."""
    return upgraded(tmp_path / "data").database_url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """URL of an upgraded database; a test that asks for it runs on SQLite and on PostgreSQL."""
    kind = "sqlite" if request.param == "sqlite" else "postgres"
    return str(request.getfixturevalue(f"{kind}_url"))

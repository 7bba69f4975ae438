"""A real PostgreSQL for tests: one server a session, a database of its own for every test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from benchmarks.service.postgres_server import PostgresServer, running_server
from results_db.admin import migrate
from results_db.database.data_dir import DataDir
from results_db.store import Store

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


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    """URL of a database of this version's schema that the test has for itself."""
    with postgres_server.database(template=TEMPLATE) as url:
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

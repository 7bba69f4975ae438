"""A real PostgreSQL for tests: one server a session, a database of its own for every test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from benchmarks.postgres_server import PostgresServer, running_server
from results_db import migrate
from results_db.data_dir import DataDir
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


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite database of this version's schema, of which those of tests are copies."""
    data_dir = DataDir(tmp_path_factory.mktemp("sqlite-template"))
    Store.open(data_dir).close()
    return Path(data_dir.database_url.removeprefix("sqlite:///"))


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """URL of an upgraded SQLite database that the test has for itself, in `tmp_path / "data"`."""
    data_dir = DataDir(tmp_path / "data")
    data_dir.create()
    shutil.copy(sqlite_template, data_dir.path)
    return data_dir.database_url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """URL of an upgraded database; a test that asks for it runs on SQLite and on PostgreSQL."""
    kind = "sqlite" if request.param == "sqlite" else "postgres"
    return str(request.getfixturevalue(f"{kind}_url"))

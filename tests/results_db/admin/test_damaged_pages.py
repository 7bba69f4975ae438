"""`db check` on a damaged file names the table or the index, the place, and what to do."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.service.postgres_server import PostgresServer, running_server
from results_db.admin.commands import db
from results_db.admin.integrity import check_database
from results_db.migrations import migrate
from tests.results_db.database.test_constraints import fill

PAGE = 8192
"""Bytes of a page of PostgreSQL."""


def overwrite(path: Path, page: int, size: int) -> None:
    with path.open("r+b") as file:
        file.seek(page * size)
        file.write(b"\xa5" * size)


def root_page(path: Path, name: str) -> tuple[int, int]:
    """Where a table or an index of a SQLite begins, and how large its pages are."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (page,) = connection.execute(query, (name,)).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    return page - 1, size


@pytest.mark.parametrize("name", ["iterations", "trials", "alembic_version"])
def test_a_damaged_table_of_a_sqlite_is_named(sqlite_url: str, name: str) -> None:
    fill(sqlite_url)
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    overwrite(path, *root_page(path, name))
    report = check_database(sqlite_url)
    messages = [finding.message for finding in report.findings]
    (message,) = (each for each in messages if each.startswith(f"the table {name} is damaged ("))
    assert "restore the last good backup with `layout-tuner db restore`" in message
    assert report.checks == ("storage",)
    asked = CliRunner().invoke(db, ["check", "--data-dir", str(path.parent)])
    assert asked.exit_code == 1
    assert f"the table {name} is damaged" in asked.output


def test_a_damaged_index_of_a_sqlite_is_named(sqlite_url: str) -> None:
    fill(sqlite_url)
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    name = "ix_trials_campaign_id_state"
    overwrite(path, *root_page(path, name))
    (finding,) = check_database(sqlite_url).findings
    assert finding.message.startswith(f"the index {name} is damaged (")
    assert (
        f'its table is whole: stop the service and rebuild it in `sqlite3 results.sqlite3` with REINDEX "{name}"'
        in finding.message
    )


@pytest.fixture(
    scope="module", params=["full read", pytest.param("amcheck", marks=pytest.mark.slow)]
)
def server(request: pytest.FixtureRequest) -> Iterator[PostgresServer]:
    """A server for this module alone, which is stopped to damage its files.

    The package's PostgreSQL has no amcheck; one that is installed on this machine may have it.
    """
    programs = None
    if request.param == "amcheck":
        controls = Path("/usr/share/postgresql").glob("*/extension/amcheck.control")
        versions = sorted(int(control.parts[4]) for control in controls)
        if not versions or versions[-1] < 14:
            pytest.skip("no PostgreSQL with amcheck is installed")
        programs = Path(f"/usr/lib/postgresql/{versions[-1]}/bin")
    with running_server(programs=programs) as server:
        yield server


def has_amcheck(server: PostgresServer) -> bool:
    return bool(server.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'amcheck'"))


def filled(server: PostgresServer, name: str) -> str:
    server.execute(f"CREATE DATABASE {name}")
    if has_amcheck(server):
        server.execute("CREATE SCHEMA checks", name)
        server.execute("CREATE EXTENSION amcheck SCHEMA checks", name)
    url = server.url(name)
    migrate.upgrade(url)
    fill(url)
    return url


def damage(server: PostgresServer, database: str, relation: str) -> None:
    """Writes over the last page of a relation's file while the server is stopped."""
    ((path, size),) = server.execute(
        f"SELECT pg_relation_filepath('{relation}'), pg_relation_size('{relation}')", database
    )
    server.execute("CHECKPOINT")
    server.stop()
    overwrite(server.data / path, size // PAGE - 1, PAGE)
    server.start()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["iterations", "alembic_version"])
def test_a_damaged_table_of_a_postgresql_is_named(server: PostgresServer, name: str) -> None:
    url = filled(server, f"damaged_{name}")
    damage(server, f"damaged_{name}", name)
    report = check_database(url)
    (finding,) = report.findings
    assert finding.message.startswith(f"the table {name} is damaged (")
    assert "block 0" in finding.message
    assert "restore the last good backup with `layout-tuner db restore`" in finding.message
    assert report.checks == ("storage",)


def test_a_damaged_index_of_a_postgresql_is_named_and_rebuilt(server: PostgresServer) -> None:
    url = filled(server, "damaged_index")
    name = "ix_trials_campaign_id_state"
    damage(server, "damaged_index", name)
    report = check_database(url)
    (finding,) = report.findings
    assert report.storage.startswith("amcheck" if has_amcheck(server) else "a full read")
    assert finding.message.startswith(f"the index {name} is damaged (")
    assert f'its table is whole: rebuild it with REINDEX INDEX "{name}"' in finding.message
    server.execute(f'REINDEX INDEX "{name}"', "damaged_index")
    assert check_database(url).findings == ()


def test_amcheck_finds_a_row_that_an_index_lacks(server: PostgresServer) -> None:
    if not has_amcheck(server):
        pytest.skip("its other parameter tests it")
    url = filled(server, "missing_row")
    hidden = "UPDATE pg_index SET indisready = {} WHERE indexrelid = 'pk_trial_logs'::regclass"
    server.execute(hidden.format("false"), "missing_row")
    server.execute(
        "INSERT INTO trial_logs (trial_id, tail) SELECT id, 'x' FROM trials "
        "WHERE id NOT IN (SELECT trial_id FROM trial_logs) LIMIT 1",
        "missing_row",
    )
    server.execute(hidden.format("true"), "missing_row")
    (finding,) = check_database(url).findings
    assert finding.message.startswith("the index pk_trial_logs is damaged (")


def test_amcheck_is_left_out_where_the_role_may_not_call_it(server: PostgresServer) -> None:
    url = filled(server, "not_permitted")
    server.execute("CREATE ROLE reader LOGIN")
    for grant in (
        "CREATE ON DATABASE not_permitted",
        "USAGE ON SCHEMA public",
        "ALL ON ALL TABLES IN SCHEMA public",
        "ALL ON ALL SEQUENCES IN SCHEMA public",
    ):
        server.execute(f"GRANT {grant} TO reader", "not_permitted")
    report = check_database(url.replace("postgres@", "reader@"))
    assert report.storage == "a full read, as amcheck is not installed or not permitted"
    assert report.findings == ()

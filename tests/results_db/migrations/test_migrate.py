"""The machinery of migrations: versions that meet, interrupted and concurrent upgrades."""

import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect

from benchmarks.service.postgres_server import PostgresServer
from results_db.admin.integrity import check_database
from results_db.database.data_dir import DataDir
from results_db.database.database import Database
from results_db.errors import (
    DatabaseInvalidError,
    DatabaseUnavailableError,
    SchemaNewerError,
    SchemaOutdatedError,
)
from results_db.migrations import migrate
from results_db.models.base import Base
from results_db.store import Store
from tests.kit.postgres import is_anybody_waiting
from tests.kit.store import make_campaign, make_worker
from tests.results_db.next_version import (
    NEXT,
    THIS,
    WITH_NEXT,
    become_next_version,
    become_this_version,
)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'results.sqlite3'}"


def test_scripts_are_named_after_revisions_up_to_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    for head in (THIS, NEXT):
        folders = [str(folder) for folder in migrate.VERSIONS]
        scripts = ScriptDirectory(str(migrate.SCRIPTS), version_locations=folders)
        found = {script.revision: Path(script.path).name for script in scripts.walk_revisions()}
        assert all(name.startswith(f"{revision}_") for revision, name in found.items())
        assert sorted(found) == list(migrate.revisions(migrate.VERSIONS))
        assert migrate.head() == scripts.get_current_head() == head
        become_next_version(monkeypatch)


def assert_as_described(url: str) -> None:
    """The database has the tables, indexes, references and checks of the models."""
    with closing(Database(url)) as database, database.engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        found = inspect(connection)
        for table in Base.metadata.sorted_tables:
            # Alembic does not compare check constraints, and PostgreSQL writes them in other words.
            described = {
                str(c.name): str(c.sqltext) for c in table.constraints if hasattr(c, "sqltext")
            }
            kept = {c["name"]: c["sqltext"] for c in found.get_check_constraints(table.name)}
            assert kept.keys() == described.keys(), table.name
            assert kept == described or connection.dialect.name != "sqlite", table.name
            references = {reference["name"] for reference in found.get_foreign_keys(table.name)}
            assert references == {each.name for each in table.foreign_key_constraints}


def test_the_migrations_build_what_the_models_describe(database_url: str) -> None:
    assert_as_described(database_url)
    migrate.downgrade(database_url, "base")
    with closing(Database(database_url)) as database:
        assert set(inspect(database.engine).get_table_names()) <= {"alembic_version"}
    migrate.upgrade(database_url)
    assert_as_described(database_url)


def test_upgrading_twice_changes_nothing(url: str, tmp_path: Path) -> None:
    with pytest.raises(SchemaOutdatedError, match="revision none"):
        migrate.check(url)
    migrate.upgrade(url)
    before = (tmp_path / "results.sqlite3").read_bytes()
    migrate.upgrade(url)
    assert (tmp_path / "results.sqlite3").read_bytes() == before


def test_a_database_of_the_next_version_is_refused_and_left_as_it_is(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    become_next_version(monkeypatch)
    migrate.upgrade(database_url)
    become_this_version(monkeypatch)
    if database_url.startswith("sqlite"):
        before = (tmp_path / "data" / "results.sqlite3").read_bytes()
        with pytest.raises(SchemaNewerError, match=f"{NEXT}.*newer version"):
            Store.open(DataDir(tmp_path / "data"))
        assert (tmp_path / "data" / "results.sqlite3").read_bytes() == before
    for refused in (migrate.upgrade, migrate.check, migrate.revision, Store.connect):
        with pytest.raises(SchemaNewerError, match=f"{NEXT}.*newer version"):
            refused(database_url)
    become_next_version(monkeypatch)
    assert migrate.check(database_url) == NEXT


def spoil(path: Path, how: str) -> None:
    if how == "garbage":
        path.write_bytes(b"no database, but long enough to be taken for one. " * 100)
    elif how == "directory":
        path.mkdir()
    else:
        migrate.upgrade(f"sqlite:///{path}")
        content = path.read_bytes()
        path.write_bytes(content[:100] + bytes(len(content) - 100))


def test_a_database_that_is_none_is_refused_by_its_name(tmp_path: Path) -> None:
    for how in ("garbage", "directory", "damaged"):
        path = tmp_path / how / "results.sqlite3"
        path.parent.mkdir(mode=0o700)
        spoil(path, how)
        for open_it in (
            partial(Store.open, DataDir(path.parent)),
            partial(migrate.check, f"sqlite:///{path}"),
            Store(f"sqlite:///{path}").campaigns.find,
        ):
            with pytest.raises(
                DatabaseUnavailableError, match=r"results\.sqlite3 cannot be used: "
            ):
                open_it()


def test_the_embedded_database_writes_ahead_and_checks_foreign_keys(tmp_path: Path) -> None:
    store = Store.open(DataDir(tmp_path))
    with store._db.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    store.close()


def run(url: str, *statements: str) -> None:
    """Runs statements; on SQLite references are not looked at."""
    database = Database(url)
    with database.engine.connect() as connection:
        if connection.dialect.name == "sqlite":
            driver = connection.connection.driver_connection
            driver.execute("PRAGMA foreign_keys = OFF")
        for statement in statements:
            connection.exec_driver_sql(statement)
        connection.commit()
    database.close()


def test_refused_rows_stop_an_upgrade(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Store(database_url)) as store:
        make_worker(store, devices_per_node=65)
    become_next_version(monkeypatch)
    with pytest.raises(
        DatabaseInvalidError, match=r"ck_workers_devices_are_few.*left as it was: put those"
    ):
        migrate.upgrade(database_url)
    assert migrate.revision(database_url) == THIS
    run(database_url, "UPDATE workers SET devices_per_node = 64")
    migrate.upgrade(database_url)
    assert migrate.check(database_url) == NEXT


def test_orphaned_rows_stop_an_upgrade(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(sqlite_url, "INSERT INTO trial_logs VALUES (7, 'a log of no trial')")
    become_next_version(monkeypatch)
    with pytest.raises(DatabaseInvalidError, match="row 7 of trial_logs refers to a row of trials"):
        migrate.upgrade(sqlite_url)
    assert migrate.revision(sqlite_url) == THIS


UPGRADE = """
import sys
from pathlib import Path
from results_db.migrations import migrate

migrate.VERSIONS = tuple(Path(folder) for folder in sys.argv[2:])
refuse_orphans = migrate._refuse_orphans

def pause_before_the_commit(connection):
    print("before the commit", flush=True)
    sys.stdin.readline()
    refuse_orphans(connection)

migrate._refuse_orphans = pause_before_the_commit
print("begins", flush=True)
migrate.upgrade(sys.argv[1])
"""
"""A process of the next version: it upgrades a database and waits for a line before the commit."""


def start_upgrade(url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", UPGRADE, url, *map(str, WITH_NEXT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout.readline() == f"{line}\n"


@pytest.mark.slow
def test_a_killed_upgrade_changes_nothing(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Store(database_url)) as store:
        make_campaign(store)
    with start_upgrade(database_url) as process:
        wait_for(process, "begins")
        wait_for(process, "before the commit")
        process.kill()
    assert migrate.check(database_url) == THIS
    assert check_database(database_url).findings == ()
    become_next_version(monkeypatch)
    migrate.upgrade(database_url)
    assert migrate.check(database_url) == NEXT
    with closing(Store(database_url)) as store:
        assert [campaign.notes for campaign in store.campaigns.find()] == ["no notes"]


@pytest.mark.slow
def test_of_two_upgrades_at_once_one_waits_and_finds_it_done(
    database_url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_upgrade(database_url) as first:
        wait_for(first, "begins")
        wait_for(first, "before the commit")
        second = start_upgrade(database_url)
        wait_for(second, "begins")
        if not database_url.startswith("sqlite"):
            server = request.getfixturevalue("postgres_server")
            assert isinstance(server, PostgresServer)
            while not is_anybody_waiting(server, database_url):
                assert second.poll() is None
        ends = [process.communicate("\n", timeout=60)[1] for process in (first, second)]
    assert (first.returncode, second.returncode, ends) == (0, 0, ["", ""])
    become_next_version(monkeypatch)
    assert migrate.check(database_url) == NEXT

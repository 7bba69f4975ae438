"""A database that cannot be used, at the start or later: clear errors, and recovery."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event

from benchmarks.service.postgres_server import running_server
from layout_tuner.api.app import create_app
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.admin.backup_file import back_up
from layout_tuner.results_db.admin.integrity import check_database
from layout_tuner.results_db.admin.restore import restore_into_data_dir
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.migrations import migrate
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import HEADERS, TOKEN, Api, answered, refused_line
from tests.kit.services import run_here
from tests.kit.store import TimelyStore, completed
from tests.kit.waiting import wait_until
from tests.results_db.first_weeks import write_first_weeks
from tests.results_db.sealed import sealed


@contextmanager
def serving(store: Store) -> Iterator[Api]:
    with closing(store), client_to(store) as http:
        yield Api(http)


def client_to(store: Store) -> TestClient:
    app = create_app(Settings(token=TOKEN, lease_poll_s=0.02), store)
    return TestClient(app, headers=HEADERS, raise_server_exceptions=False)


def limited(store: Store) -> dict[str, int]:
    """The most pages of the database: SQLite says of its own bound what it says of a full disk."""
    pages = {"limit": 1000000}

    @event.listens_for(store._db.engine, "begin")
    def limit(connection: Any) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count = {pages['limit']}")

    return pages


def damage(data_dir: DataDir, table: str) -> None:
    """Writes over the first page of a table, as a failing disk would."""
    path = data_dir.path / "results.sqlite3"
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (page,) = connection.execute(query, (table,)).fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    with path.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xa5" * size)


def test_a_damaged_page_is_one_clear_error_and_a_backup_brings_all_back(
    data_dir: DataDir, tmp_path: Path
) -> None:
    backup = tmp_path / "backup.sqlite3"
    with serving(TimelyStore.open(data_dir)) as api:
        api.submit()
        trial = api.complete(api.register(), "first", Layout())
        before = api.get(f"/trials/{trial}")
        back_up(data_dir.database_url, backup)
    damage(data_dir, "iterations")
    with serving(TimelyStore.open(data_dir)) as api:
        why = "database disk image is malformed; it is damaged: "
        answered(api.http.get(f"/v1/trials/{trial}"), 503, why, "layout-tuner db restore")
        api.get("/campaigns/first")  # what does not touch the page goes on
    try:
        said = " ".join(each.message for each in check_database(data_dir.database_url).findings)
    except Exception as error:  # a database may be too damaged to be looked through
        said = str(error)
    assert "malformed" in said or "iterations" in said
    report = restore_into_data_dir(backup, data_dir, replace=True)
    assert report.set_aside is not None
    with serving(TimelyStore.open(data_dir)) as api:
        assert api.get(f"/trials/{trial}") == before


def test_a_full_disk_loses_no_outcome_and_is_one_outage_though_reading_works_meanwhile(
    data_dir: DataDir, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(TimelyStore.open(data_dir)) as api:
        pages = limited(api.store)
        api.submit()
        worker = api.register()
        trial = api.store.trials.add(1, Layout())
        outcome = completed().to_mapping()
        outcome["log_tail"] = "more than the pages that are there can take\n" * 2000
        body = {"worker_id": worker, "attempt": api.lease(worker)["attempt"], "outcome": outcome}
        pages["limit"] = 1
        for _ in range(5):
            answer = api.post(f"/trials/{trial.id}/outcome", body, status=503)
            assert answer["detail"].endswith("is full; free space on its disk")
            assert api.get(f"/trials/{trial.id}")["state"] == "RUNNING"
        (line,) = outage_lines(caplog)
        assert "disk is full" in line
        pages["limit"] = 1000000
        assert api.post(f"/trials/{trial.id}/outcome", body)["accepted"]
        wait_until(
            "its end is logged",
            lambda: api.post("/campaigns/first/pause") and len(outage_lines(caplog)) == 2,
        )
        assert "works again after" in outage_lines(caplog)[1]
    assert check_database(data_dir.database_url).findings == ()


def test_a_locked_database_refuses_changes_in_words_and_is_read_meanwhile(
    data_dir: DataDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layout_tuner.results_db.database.sqlite.BUSY_TIMEOUT_S", 0.2)
    with serving(TimelyStore.open(data_dir)) as api:
        api.submit()
        with closing(sqlite3.connect(data_dir.path / "results.sqlite3")) as other:
            other.execute("BEGIN IMMEDIATE")
            refused = api.post("/campaigns/first/pause", status=503)
            assert "database is locked; another process has held it" in refused["detail"]
            assert api.get("/campaigns/first")["state"] == "RUNNING"
            api.get("/ready")
        assert api.post("/campaigns/first/pause")["state"] == "PAUSED"


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    with running_server() as server:
        yield server


@pytest.fixture
def url(server: Any, request: pytest.FixtureRequest) -> str:
    """A database of the test's own on the server, which it stops and starts again."""
    name = f"of_{len(str(request.node.name))}"
    server.execute(f"CREATE DATABASE {name}")
    url = str(server.url(name))
    migrate.upgrade(url)
    return url


def test_a_postgresql_that_is_gone_is_told_and_taken_up_again_when_it_is_back(
    server: Any, url: str
) -> None:
    with serving(TimelyStore(url)) as api:
        api.submit()
        server.stop()
        for path in ("/campaigns", "/campaigns/first"):
            assert "cannot be used" in api.get(path, status=503)["detail"]
        assert api.get("/ready", status=503)["reasons"] == ["the database does not answer"]
        server.start()
        wait_until("it is ready again", lambda: api.http.get("/v1/ready").status_code == 200)
        assert api.get("/campaigns/first")["state"] == "RUNNING"
        assert api.post("/campaigns/first/pause")["state"] == "PAUSED"


def test_a_service_whose_database_goes_between_opening_and_the_first_sweep_waits_for_it(
    server: Any, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    answers: list[int] = []

    def serve() -> None:
        with client_to(store) as http:
            answers.append(http.get("/v1/ready").status_code)

    with closing(TimelyStore(url)) as store:
        server.stop()
        starting = threading.Thread(target=serve)
        starting.start()
        wait_until("it waits", lambda: "it is tried again for up to" in caplog.text)
        server.start()
        starting.join()
    assert answers == [200]


def outage_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    name = "layout_tuner.results_db.database.database"
    return [record.getMessage() for record in caplog.records if record.name == name]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("command", ["serve", "driver", "up"])
@pytest.mark.parametrize("how", ["garbage", "directory"])
def test_a_file_that_is_no_database_is_one_clear_error(
    tmp_path: Path, how: str, command: str
) -> None:
    database = tmp_path / "results.sqlite3"
    garbage = b"no database, but long enough to be taken for one. " * 100
    if how == "garbage":
        database.write_bytes(garbage)
    else:
        database.mkdir()
    port = () if command == "driver" else ("--port", "0")
    line = refused_line(run_here(command, "--data-dir", str(tmp_path), *port))
    assert line.startswith(f"Error: the database {database} cannot be used: ")
    if how == "garbage":
        assert database.read_bytes() == garbage


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "command",
    [
        ("serve", "--port", "0"),
        ("up", "--port", "0"),
        ("driver",),
        ("db", "upgrade"),
        ("db", "check"),
        ("db", "prune"),
        ("db", "backup", "FOLDER/backup"),
        ("db", "restore", "FOLDER/old.sqlite3"),
    ],
    ids=" ".join,
)
def test_a_database_of_another_version_is_one_clear_error(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    database = tmp_path / ("old.sqlite3" if "restore" in command else "data/results.sqlite3")
    (tmp_path / "data").mkdir()
    write_first_weeks(database)
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'r999'")
    if "restore" in command:
        sealed(database)
    before = database.read_bytes()
    words = [word.replace("FOLDER", str(tmp_path)) for word in command]
    line = refused_line(run_here(*words, "--data-dir", str(tmp_path / "data")))
    assert line == (
        f"Error: the database is at revision r999, which this version ({migrate.head()}) does not "
        "know: a newer version of layout-tuner wrote it, or one that was not released; run the "
        "version that wrote it, or choose another data directory or database"
    )
    assert database.read_bytes() == before
    assert not (tmp_path / "backup").exists()

"""What starts on a database that it cannot use says so in one line, and leaves it as it is."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from results_db.migrations import migrate
from tests.kit.services import run_here
from tests.results_db.first_weeks import write_first_weeks
from tests.results_db.sealed import sealed


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
    refused = run_here(command, "--data-dir", str(tmp_path), *port)
    assert refused.exit_code == 1
    (line,) = refused.stderr.splitlines()
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
    refused = run_here(*words, "--data-dir", str(tmp_path / "data"))
    assert refused.exit_code == 1
    (line,) = refused.stderr.splitlines()
    assert line == (
        f"Error: the database is at revision r999, which this version ({migrate.head()}) does not "
        "know: a newer version of layout-tuner wrote it, or one that was not released; run the "
        "version that wrote it, or choose another data directory or database"
    )
    assert database.read_bytes() == before
    assert not (tmp_path / "backup").exists()

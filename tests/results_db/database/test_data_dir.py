"""Where the database lies: its directory, or its address, of which no message shows a password."""

import os
from pathlib import Path

import pytest

from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.database.url import postgresql_url, shown
from layout_tuner.results_db.errors import (
    DatabaseUrlInvalidError,
    DataDirInvalidError,
    DataDirLockedError,
)
from layout_tuner.results_db.store import Store
from tests.kit.postgres import upgraded
from tests.kit.python_process import start_python
from tests.kit.store import make_campaign

HOLD_THE_LOCK = """
import sys
from pathlib import Path
from layout_tuner.results_db.database.data_dir import DataDir
with DataDir(Path(sys.argv[1])).lock("serve"):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_the_environment_chooses_the_data_directory() -> None:
    chosen = {"LAYOUT_TUNER_DATA_DIR": "/a", "XDG_DATA_HOME": "/b", "HOME": "/c"}
    assert DataDir.default(chosen).path == Path("/a")
    del chosen["LAYOUT_TUNER_DATA_DIR"]
    assert DataDir.default(chosen).path == Path("/b/layout-tuner")
    del chosen["XDG_DATA_HOME"]
    assert DataDir.default(chosen).path == Path.home() / ".local/share/layout-tuner"


def test_a_data_directory_that_everybody_can_write_to_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(DataDirInvalidError) as refused:
        DataDir(tmp_path).create()
    assert str(refused.value).startswith(
        f"every user of this machine can replace the files in the data directory {tmp_path} "
        "(mode 1777): chmod o-w it, or choose a directory below it"
    )
    assert list(tmp_path.iterdir()) == []


def test_only_its_owner_can_read_the_database_in_a_directory_that_was_there(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0o022)
    try:
        store = Store.open(DataDir(tmp_path))
        make_campaign(store)
        modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.glob("results.*")}
        store.close()
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(
        ("results.sqlite3", "results.sqlite3-wal", "results.sqlite3-shm"), 0o600
    )


def test_opening_leaves_the_mode_of_a_database_as_its_owner_set_it(tmp_path: Path) -> None:
    place = upgraded(tmp_path / "deep" / "data")
    assert place.path.stat().st_mode & 0o777 == 0o700
    (place.path / "results.sqlite3").chmod(0o640)
    Store.open(place).close()
    assert (place.path / "results.sqlite3").stat().st_mode & 0o777 == 0o640


def test_a_path_that_is_a_file_or_that_a_url_would_garble_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    with pytest.raises(DataDirInvalidError, match="choose another with --data-dir"):
        DataDir(tmp_path / "data").create()
    for name in ("a?b", "a%20b"):
        with pytest.raises(DataDirInvalidError, match=r"has \? or %"):
            DataDir(tmp_path / name).create()
        assert not (tmp_path / name).exists()


def test_the_database_lies_in_the_directory_whatever_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "a b#c@d:e \N{SNOWMAN}"
    Store.open(DataDir(folder)).close()
    assert (folder / "results.sqlite3").exists()


def test_a_lock_is_held_against_other_processes_until_its_process_ends(tmp_path: Path) -> None:
    data_dir = DataDir(tmp_path)
    holder = start_python(HOLD_THE_LOCK, str(tmp_path))
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(DataDirLockedError, match="serve lock"), data_dir.lock("serve"):
        pass
    holder.kill()
    holder.communicate()
    with data_dir.lock("serve", wait_s=10):
        pass


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_a_postgresql_is_named_by_any_of_its_schemes(scheme: str) -> None:
    url = postgresql_url(f"{scheme}://service:s%40cret@db.example:5433/tuning?sslmode=require")
    assert url == "postgresql+psycopg://service:s%40cret@db.example:5433/tuning?sslmode=require"


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mysql://service:sesame@db/tuning", "begins with mysql://, and only postgresql://"),
        ("postgresql+asyncpg://service:sesame@db/tuning", r"begins with postgresql\+asyncpg://"),
        ("sqlite:////tmp/sesame.sqlite3", "SQLite needs no URL"),
        ("postgresql://service:sesame@db", "postgresql://service@db names no database"),
        (
            "postgresql://service:ses@me:x@db:port/tuning",
            "URL is none: write postgresql://USER@HOST",
        ),
        ("tuning sesame", "URL is none"),
        ("", "URL is none"),
    ],
)
def test_another_address_is_refused_without_showing_its_secrets(url: str, why: str) -> None:
    with pytest.raises(DatabaseUrlInvalidError, match=why) as refused:
        postgresql_url(url)
    assert "ses" not in str(refused.value)
    assert refused.value.__cause__ is None


def test_an_address_is_shown_without_its_secrets() -> None:
    url = "postgresql://service:sesame@db/tuning?sslmode=require&password=sesame&sslpassword=sesame"
    assert shown(url) == "postgresql://service@db/tuning?sslmode=require"
    assert shown("sqlite:////srv/data/results.sqlite3") == "/srv/data/results.sqlite3"

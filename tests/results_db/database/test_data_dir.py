import os
import subprocess
import sys
from pathlib import Path

import pytest

from results_db.database.data_dir import DataDir
from results_db.errors import DataDirInvalidError, DataDirLockedError
from results_db.store import Store
from tests.kit.store import make_campaign

HOLD_THE_LOCK = """
import sys
from pathlib import Path
from results_db.database.data_dir import DataDir
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


def test_only_its_owner_can_look_into_a_data_directory(tmp_path: Path) -> None:
    data_dir = DataDir(tmp_path / "deep" / "data")
    data_dir.create()
    assert data_dir.path.stat().st_mode & 0o777 == 0o700


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
    Store.open(DataDir(tmp_path)).close()
    (tmp_path / "results.sqlite3").chmod(0o640)
    Store.open(DataDir(tmp_path)).close()
    assert (tmp_path / "results.sqlite3").stat().st_mode & 0o777 == 0o640


def test_a_data_directory_that_is_a_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("")
    with pytest.raises(DataDirInvalidError, match="choose another with --data-dir"):
        DataDir(tmp_path / "data").create()


@pytest.mark.parametrize("name", ["a?b", "a%20b"])
def test_a_path_that_a_url_would_garble_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataDirInvalidError, match=r"has \? or %"):
        DataDir(tmp_path / name).create()
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["a b", "a#b", "a@b:c", "\N{SNOWMAN}"])
def test_the_database_lies_in_the_directory_whatever_its_name(tmp_path: Path, name: str) -> None:
    Store.open(DataDir(tmp_path / name)).close()
    assert (tmp_path / name / "results.sqlite3").exists()


def test_a_lock_is_held_against_other_processes_until_its_process_ends(tmp_path: Path) -> None:
    data_dir = DataDir(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(DataDirLockedError, match="serve lock"), data_dir.lock("serve"):
        pass
    holder.kill()
    holder.communicate()
    with data_dir.lock("serve", wait_s=10):
        pass

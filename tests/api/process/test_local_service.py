"""Finding the service of this machine, and nobody else in its place."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from api.process.local_service import announced, serving
from results_db.database.data_dir import DataDir
from results_db.errors import DataDirLockedError
from search_spaces.connection.running_service import find_service
from tests.kit.services import ServeProcess, run_command

URL = "http://127.0.0.1:9"


@pytest.fixture
def data(tmp_path: Path) -> DataDir:
    data = DataDir(tmp_path)
    data.create()
    return data


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_no_service_is_found_before_one_serves_after_its_end_or_by_another_process(
    data: DataDir,
) -> None:
    assert find_service(data.path) is None
    with serving(data), announced(data, URL):
        found = find_service(data.path)
        assert found is not None
        assert (found.url, found.pid) == (URL, os.getpid())
    assert find_service(data.path) is None
    assert not data.service_file.exists()

    data.service_file.write_text(json.dumps({"url": URL, "pid": os.getpid()}))
    assert find_service(data.path) is None

    assert find_service(data.path / "nowhere") is None


@pytest.mark.slow
def test_the_token_is_not_sent_to_whoever_listens_where_a_killed_service_did(
    tmp_path: Path,
) -> None:
    service = ServeProcess(tmp_path)
    port = int(service.service["url"].rpartition(":")[2])
    service.end(signal.SIGKILL)
    assert (tmp_path / "service.json").exists()
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        stranger.setblocking(False)
        asked = run_command("campaign", "list", "--data-dir", str(tmp_path))
        with pytest.raises(BlockingIOError):
            stranger.accept()
    assert asked.returncode == 1
    (line,) = asked.stderr.splitlines()
    assert line.startswith(f"Error: no service runs on the data directory {tmp_path}")


def test_where_no_data_directory_is_no_service_runs_and_the_command_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for missing in (tmp_path / "missing", tmp_path / "file"):
        asked = run_command("campaign", "list", "--data-dir", str(missing))
        assert asked.returncode == 1
        (line,) = asked.stderr.splitlines()
        assert line.startswith(f"Error: no service runs on the data directory {missing}")
        assert not (missing / "serve.lock").exists()


def test_a_service_that_starts_is_not_taken_for_the_one_before_it(data: DataDir) -> None:
    stale = json.dumps({"url": URL, "pid": dead_pid()})
    data.service_file.write_text(stale)
    with data.lock("serve"):
        assert find_service(data.path) is None
    with serving(data):
        assert not data.service_file.exists()


def test_an_invalid_service_file_names_no_service(data: DataDir) -> None:
    for content in (
        *(b"", b"null", b"\xff", b"[" * 5000, b'{"url": 3, "pid": 1}'),
        *(
            b'{"url": "http://127.0.0.1:9", "pid": true}',
            b'{"url": "http://127.0.0.1:9", "pid": -1}',
        ),
    ):
        data.service_file.write_bytes(content)
        with data.lock("serve"):
            assert find_service(data.path) is None, content


def test_looking_for_a_service_does_not_keep_one_from_starting(data: DataDir) -> None:
    looking, let_go = threading.Event(), threading.Event()

    def look() -> None:
        with data.lock("serve"):
            looking.set()
            let_go.wait(20)

    looker = threading.Thread(target=look)
    looker.start()
    assert looking.wait(20)
    threading.Timer(0.2, let_go.set).start()
    with serving(data), pytest.raises(DataDirLockedError), data.lock("serve"):
        pass
    looker.join()

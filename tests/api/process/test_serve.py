"""`serve` and `up` as processes: start, end, kill -9, what they refuse, and how they are found."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.api.http.bind_address import Endpoint, listening
from layout_tuner.api.process.local_service import announced, serving
from layout_tuner.protocol.connection.running_service import find_service
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.errors import DataDirLockedError
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, INTRODUCTION, ends, refused_line
from tests.kit.persons import Person
from tests.kit.python_process import printed_by
from tests.kit.services import ServeProcess, run_here
from tests.kit.store import TimelyStore, completed
from tests.kit.waiting import wait_until

WORKER = {**INTRODUCTION, "cluster": "local-cpu", "devices_per_node": 4}
LAYOUT = Layout(num_microbatches=8)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    """One that is killed and ended by the tests, in their order."""
    data_dir = tmp_path_factory.mktemp("service") / "data"
    data_dir.mkdir(mode=0o755)
    service = ServeProcess(data_dir, umask=0)
    yield service
    service.end()


def test_a_service_listens_at_one_address(service: ServeProcess) -> None:
    assert service.get("/health")["database"]
    assert service.service["url"].startswith("http://127.0.0.1:")
    assert service.get("/campaigns") == {"campaigns": [], "next_cursor": None}
    port = int(service.service["url"].rpartition(":")[2])
    with socket.socket() as other:
        # Another of this machine's loopback addresses, which a wildcard would cover.
        assert other.connect_ex(("127.0.0.2", port)) != 0


def test_the_files_of_a_service_are_their_owners_alone_whatever_the_umask(
    service: ServeProcess,
) -> None:
    names = {path.name for path in service.data_dir.iterdir()}
    assert {"service.json", "serve.lock", "token", "logs"} <= names
    assert [path for path in service.data_dir.rglob("*") if path.stat().st_mode & 0o077] == []
    assert len(service.token) >= 32


def test_two_services_do_not_share_a_data_directory(service: ServeProcess) -> None:
    line = refused_line(run_here("serve", "--port", "0", "--data-dir", str(service.data_dir)))
    assert str(service.data_dir) in line
    assert service.get("/health")["database"]


def test_a_completed_outcome_and_the_token_survive_kill_9(service: ServeProcess) -> None:
    campaign = service.post("/campaigns", CAMPAIGN)
    worker = service.post("/workers", WORKER)["worker_id"]
    with closing(TimelyStore(DataDir(service.data_dir).database_url)) as store:
        trial = store.trials.add(campaign["id"], LAYOUT)
        other = store.trials.add(campaign["id"], Layout(tp=2, num_microbatches=8))
    service.post(f"/workers/{worker}/leases", {"max_trials": 2})
    body = {"worker_id": worker, "attempt": 1, "outcome": dataclasses.asdict(completed(LAYOUT))}
    assert service.post(f"/trials/{trial.id}/outcome", body)["accepted"]
    token = service.token
    assert service.end(signal.SIGKILL) == -signal.SIGKILL
    service.start()
    assert service.token == token
    assert service.get(f"/trials/{trial.id}")["state"] == "COMPLETED"
    # The worker never noticed: its session and its other lease are still good.
    beat = {"trials": [{"trial_id": other.id, "attempt": 1, "iterations_done": 1}]}
    assert service.post(f"/workers/{worker}/heartbeats", beat)["stop"] == []
    assert service.post(f"/trials/{trial.id}/outcome", body)["accepted"]
    assert len(service.get("/campaigns/first/leaderboard")["trials"]) == 1
    service.post("/campaigns/first/cancel")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service_in_order(service: ServeProcess, number: int) -> None:
    if service.process.poll() is not None:
        service.start()
    service.http.timeout = 60.0  # the wait is recorded as a sign of life after 5 s
    worker = service.post("/workers", {**WORKER, "name": f"of-{number}"})["worker_id"]
    answers: list[Any] = []
    waiting = threading.Thread(
        target=lambda: answers.append(service.post(f"/workers/{worker}/leases", {"wait_s": 20}))
    )
    waiting.start()

    def seen() -> list[str]:
        workers = service.get("/workers")["workers"]
        return [each["seen_at"] for each in workers if each["name"] == f"of-{number}"]

    first = seen()
    wait_until("the wait is a sign of life", lambda: seen() != first)
    service.process.send_signal(number)
    waiting.join(15)
    assert answers == [{"leases": []}]
    assert service.process.wait(15) == 0
    service.end()
    assert not (service.data_dir / "service.json").exists()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        ("known to all\n", 0o644, "can be read by others (mode 644)"),
        *((odd, 0o600, "holds no token") for odd in ("", "\n", "tök", "two words", "a\x00b")),
    ],
)
def test_a_file_that_holds_no_token_or_a_known_one_is_one_clear_error(
    tmp_path: Path, content: str, mode: int, says: str
) -> None:
    (tmp_path / "token").write_text(content)
    (tmp_path / "token").chmod(mode)
    assert says in refused_line(run_here("serve", "--port", "0", "--data-dir", str(tmp_path)))
    assert (tmp_path / "token").read_text() == content


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service_in_order_from_when_it_says_where_it_is(
    tmp_path: Path, number: int
) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "layout_tuner",
            "serve",
            "--port",
            "0",
            "--data-dir",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = process.stdout.readline()
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert said.startswith("layout-tuner serves http://127.0.0.1:"), said + rest
    assert process.returncode == 0, rest
    assert "Traceback" not in rest
    assert not (tmp_path / "service.json").exists()


def test_an_address_that_is_not_ours_is_one_clear_error(tmp_path: Path) -> None:
    line = refused_line(run_here("serve", "--host", "192.0.2.1", "--data-dir", str(tmp_path)))
    assert "192.0.2.1" in line


def test_the_service_imports_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "import layout_tuner.cli.processes.serve\n"
        "from layout_tuner.api.app import create_app\n"
        "from layout_tuner.api.settings import Settings\n"
        "from layout_tuner.results_db.database.data_dir import DataDir\n"
        "from layout_tuner.results_db.store import Store\n"
        "create_app(Settings(token='x'), Store.open(DataDir(Path(sys.argv[1])))).openapi()\n"
        "print({'torch', 'ray', 'deephyper', 'sklearn', 'pandas', 'scipy'} & set(sys.modules))\n"
    )
    assert printed_by(program, str(tmp_path)) == "set()\n"


def test_answers_leave_at_once_without_waiting_for_the_clients_acknowledgement() -> None:
    # asyncio sets TCP_NODELAY only where the listening socket says that it speaks TCP.
    seen: list[int] = []

    async def accept_one() -> None:
        accepted = asyncio.Event()

        def look(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            seen.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()
            accepted.set()

        with listening(Endpoint(host="127.0.0.1", port=0)) as listener:
            async with await asyncio.start_server(look, sock=listener):
                _, writer = await asyncio.open_connection(*listener.getsockname())
                await asyncio.wait_for(accepted.wait(), 10)
                writer.close()
                await writer.wait_closed()

    asyncio.run(accept_one())
    (no_delay,) = seen
    assert no_delay


URL = "http://127.0.0.1:9"


@pytest.fixture
def data(tmp_path: Path) -> DataDir:
    data = DataDir(tmp_path)
    data.create()
    return data


def test_a_service_is_found_only_while_it_serves(data: DataDir) -> None:
    assert find_service(data.path) is None
    with serving(data), announced(data, URL):
        found = find_service(data.path)
        assert (found.url, found.pid) == (URL, os.getpid())
    assert find_service(data.path) is None
    assert not data.service_file.exists()


def test_a_file_alone_is_no_service(data: DataDir) -> None:
    data.service_file.write_text(json.dumps({"url": URL, "pid": os.getpid()}))
    assert find_service(data.path) is None


def test_no_service_is_found_in_a_missing_folder(data: DataDir) -> None:
    assert find_service(data.path / "nowhere") is None


@pytest.fixture
def file_of_ended(data: DataDir) -> Path:
    """The file that a process which has ended left in the data directory."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    data.service_file.write_text(json.dumps({"url": URL, "pid": ended.pid}))
    return data.service_file


def test_the_file_of_an_ended_process_is_no_service(data: DataDir, file_of_ended: Path) -> None:
    with data.lock("serve"):
        assert find_service(data.path) is None


def test_a_service_removes_the_file_of_an_ended_process(data: DataDir, file_of_ended: Path) -> None:
    with serving(data):
        assert not file_of_ended.exists()


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"null", b"\xff", b"[" * 5000, b'{"url": 3, "pid": 1}'),
        *(b'{"url": "http://127.0.0.1:9", "pid": %s}' % pid for pid in (b"true", b"-1")),
    ],
    ids=["empty", "null", "not UTF-8", "deep", "url 3", "pid true", "pid -1"],
)
def test_a_file_that_cannot_be_read_is_no_service(data: DataDir, content: bytes) -> None:
    data.service_file.write_bytes(content)
    with data.lock("serve"):
        assert find_service(data.path) is None


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
        line = refused_line(run_here("campaign", "list", "--data-dir", str(tmp_path)))
        with pytest.raises(BlockingIOError):
            stranger.accept()
    assert line.startswith(f"Error: no service runs on the data directory {tmp_path}")


def test_where_no_data_directory_is_no_service_runs_and_the_command_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for missing in (tmp_path / "missing", tmp_path / "file"):
        line = refused_line(run_here("campaign", "list", "--data-dir", str(missing)))
        assert line.startswith(f"Error: no service runs on the data directory {missing}")
        assert not (missing / "serve.lock").exists()


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


def test_a_port_in_use_or_none_at_all_is_one_clear_error(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused_line(run_here("up", "--port", str(port), "--data-dir", str(tmp_path)))
    assert line.startswith(f"Error: port {port} of 127.0.0.1 is in use by another program")
    assert not (tmp_path / "service.json").exists()
    for invalid in ("99999", "-1", "http"):
        refused = run_here("up", "--port", invalid, "--data-dir", str(tmp_path / "data"))
        ends(refused, 2, "Invalid value for '--port'")
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_ending_up_ends_its_service_no_token_is_printed_and_a_second_up_names_the_first(
    tmp_path: Path,
) -> None:
    """On a terminal too."""
    data, (ours, theirs) = tmp_path / "data", os.openpty()
    command = [
        sys.executable,
        "-m",
        "layout_tuner",
        "up",
        "--port",
        "0",
        "--data-dir",
        str(data),
    ]
    up = subprocess.Popen(command, stdout=theirs, stderr=theirs)
    try:
        os.close(theirs)
        shown = b""
        while b"ready:" not in shown:
            shown += os.read(ours, 65536)
        address = re.search(r"sign in +(http://\S+)/sign-in#code=(\S+)", shown.decode())
        line = refused_line(run_here("up", "--port", "0", "--data-dir", str(data)))
        where = f"on the data directory {data} already, at {address[1]} (process "
        for words in (where, f"end it with `kill {up.pid}`", "another --data-dir and --port"):
            assert words in line
        person = Person(address[1])
        assert person.sign_in_with_code(address[2]).status_code == 200
        assert person.open("/").status_code == 200
        person.http.close()
    finally:
        up.terminate()
        assert up.wait(60) == 0
    assert str(data / "token").encode() in shown
    for name in ("token", "worker-token"):
        token = (data / name).read_bytes().strip()
        assert token not in shown
        for log in (data / "logs").iterdir():
            assert token not in log.read_bytes()

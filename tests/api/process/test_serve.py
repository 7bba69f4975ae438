"""The service as a process: start, end, kill -9, and what it refuses to start on."""

import asyncio
import dataclasses
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from api.http.bind_address import Endpoint, listening
from results_db.database.data_dir import DataDir
from search_spaces.spec.layout import Layout
from tests.kit.api import CAMPAIGN, INTRODUCTION
from tests.kit.services import ServeProcess, run_here
from tests.kit.store import TimelyStore, completed

WORKER = {**INTRODUCTION, "cluster": "local-cpu", "devices_per_node": 4}
LAYOUT = Layout(num_microbatches=8)


def test_a_service_says_where_it_is_and_listens_there_alone(service: ServeProcess) -> None:
    assert service.get("/health")["database"]
    assert service.service["url"].startswith("http://127.0.0.1:")
    assert service.get("/campaigns") == {"campaigns": [], "next_cursor": None}

    port = int(service.service["url"].rpartition(":")[2])
    with socket.socket() as other:
        # Another of this machine's loopback addresses, which a wildcard would cover.
        assert other.connect_ex(("127.0.0.2", port)) != 0


def test_files_are_their_owners_alone_whatever_the_umask_and_the_token_is_made_once(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o755)
    service = ServeProcess(tmp_path, umask=0)
    token = (tmp_path / "token").read_text()
    assert len(token.strip()) >= 32
    names = {path.name for path in tmp_path.iterdir()}
    assert {"service.json", "serve.lock", "token", "logs"} <= names
    assert [path for path in tmp_path.rglob("*") if path.stat().st_mode & 0o077] == []
    service.end()
    service.start()
    assert (tmp_path / "token").read_text() == token
    service.end()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        ("known to all\n", 0o644, "can be read by others (mode 644)"),
        *(
            (content, 0o600, "holds no token")
            for content in ("", "\n", "tök", "two words", "a\x00b")
        ),
    ],
)
def test_a_file_that_holds_no_token_or_a_known_one_is_one_clear_error(
    tmp_path: Path, content: str, mode: int, says: str
) -> None:
    (tmp_path / "token").write_text(content)
    (tmp_path / "token").chmod(mode)
    refused = run_here("serve", "--port", "0", "--data-dir", str(tmp_path))
    assert refused.exit_code == 1
    (line,) = refused.stderr.splitlines()
    assert says in line
    assert (tmp_path / "token").read_text() == content


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service_in_order_from_when_it_says_where_it_is(
    tmp_path: Path, number: int
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "api.cli", "serve", "--port", "0", "--data-dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    process.send_signal(number)
    rest, _ = process.communicate(timeout=60)
    assert said.startswith("layout-tuner serves http://127.0.0.1:"), said + rest
    assert process.returncode == 0, rest
    assert "Traceback" not in rest
    assert not (tmp_path / "service.json").exists()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service_in_order(tmp_path: Path, number: int) -> None:
    service = ServeProcess(tmp_path)
    service.http.timeout = 60.0  # the wait is recorded as a sign of life after 5 s
    worker = service.post("/workers", WORKER)["worker_id"]
    answers: list[Any] = []
    waiting = threading.Thread(
        target=lambda: answers.append(service.post(f"/workers/{worker}/leases", {"wait_s": 20}))
    )
    waiting.start()
    seen = service.get("/workers")["workers"][0]["registered_at"]
    while service.get("/workers")["workers"][0]["seen_at"] == seen:
        time.sleep(0.01)
    assert service.process is not None
    service.process.send_signal(number)
    waiting.join(15)
    assert answers == [{"leases": []}]
    assert service.process.wait(15) == 0
    service.end()
    assert not (service.data_dir / "service.json").exists()


def test_an_address_that_is_not_ours_is_one_clear_error(tmp_path: Path) -> None:
    refused = run_here("serve", "--host", "192.0.2.1", "--data-dir", str(tmp_path))
    assert refused.exit_code == 1
    assert len(refused.stderr.splitlines()) == 1
    assert "192.0.2.1" in refused.stderr


@pytest.mark.slow
def test_two_services_do_not_share_a_data_directory(service: ServeProcess) -> None:
    refused = run_here("serve", "--port", "0", "--data-dir", str(service.data_dir))
    assert refused.exit_code == 1
    assert len(refused.stderr.splitlines()) == 1
    assert str(service.data_dir) in refused.stderr
    assert service.get("/health")["database"]


def test_a_completed_outcome_survives_kill_9(service: ServeProcess) -> None:
    campaign = service.post("/campaigns", CAMPAIGN)
    worker = service.post("/workers", WORKER)["worker_id"]
    store = TimelyStore(DataDir(service.data_dir).database_url)
    trial = store.trials.add(campaign["id"], LAYOUT)
    other = store.trials.add(campaign["id"], Layout(tp=2, num_microbatches=8))
    service.post(f"/workers/{worker}/leases", {"max_trials": 2})
    body = {"worker_id": worker, "attempt": 1, "outcome": dataclasses.asdict(completed(LAYOUT))}
    assert service.post(f"/trials/{trial.id}/outcome", body)["accepted"]
    assert service.end(signal.SIGKILL) == -signal.SIGKILL
    service.start()
    assert service.get(f"/trials/{trial.id}")["state"] == "COMPLETED"
    # The worker never noticed: its session and its other lease are still good.
    beat = {"trials": [{"trial_id": other.id, "attempt": 1, "iterations_done": 1}]}
    assert service.post(f"/workers/{worker}/heartbeats", beat)["stop"] == []
    assert service.post(f"/trials/{trial.id}/outcome", body)["accepted"]
    assert len(service.get("/campaigns/first/leaderboard")["trials"]) == 1
    store.close()


def test_the_service_imports_nothing_heavy(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "import api.commands.serve\n"
        "from api.app import create_app\n"
        "from api.settings import Settings\n"
        "from results_db.database.data_dir import DataDir\n"
        "from results_db.store import Store\n"
        "create_app(Settings(token='x'), Store.open(DataDir(Path(sys.argv[1])))).openapi()\n"
        "print({'torch', 'ray', 'deephyper', 'sklearn', 'pandas', 'scipy'} & set(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


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

"""PostgreSQL restarts: starting processes wait for it, and running ones log two lines about it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.service.live_service import LiveProcess, wait_until
from benchmarks.service.postgres_server import PostgresServer, running_server
from layout_tuner.results_db.database.wait_for_server import once_it_answers
from layout_tuner.results_db.errors import DatabaseUnavailableError
from layout_tuner.results_db.migrations import migrate
from layout_tuner.results_db.store import Store
from tests.e2e.test_kill_storm import services_sharing
from tests.kit.postgres import TEMPLATE
from tests.kit.services import run_here

PATIENCE_S = 60.0
ENOUGH_FAILURES = 40
"""Requests that fail in an outage; its loops fail beside them."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server for this module alone, which its tests stop."""
    with running_server() as server:
        server.execute(f"CREATE DATABASE {TEMPLATE}")
        migrate.upgrade(server.url(TEMPLATE))
        yield server


def wait_for_words(process: LiveProcess, words: str) -> None:
    def has_said() -> bool:
        assert not process.has_ended() or words in process.said(), process.said()
        return words in process.said()

    wait_until(f"it says {words!r}", has_said, PATIENCE_S)


COMMANDS = {
    "serve": (["serve", "--port", "0"], "layout-tuner serves http"),
    "driver": (["driver"], "this is the active driver"),
    "up": (["up", "--port", "0"], "layout-tuner is up at http"),
    "db upgrade": (["db", "upgrade"], "which is this version's"),
}


def start_all(commands: Iterable[str], folder: Path, url: str) -> dict[str, LiveProcess]:
    processes = {}
    environment = {**os.environ, "LAYOUT_TUNER_DATABASE_URL": url}
    for name in commands:
        place = folder / name.replace(" ", "-")
        place.mkdir()
        command = [
            sys.executable,
            "-m",
            "layout_tuner",
            *COMMANDS[name][0],
            "--data-dir",
            str(place),
        ]
        processes[name] = LiveProcess(command, environment=environment, log=place / "printed")
        processes[name].start()
    return processes


@pytest.fixture
def stopped_server(server: PostgresServer) -> Iterator[PostgresServer]:
    """The server, which is down until the test starts it."""
    server.stop()
    yield server
    if not server.is_running:
        server.start()


@pytest.mark.slow
@pytest.mark.parametrize("commands", [("serve", "db upgrade", "driver"), ("up",)])
def test_commands_that_start_while_the_database_restarts_wait_for_it_or_for_a_signal(
    commands: tuple[str, ...], stopped_server: PostgresServer, tmp_path: Path
) -> None:
    url = stopped_server.url(TEMPLATE)
    (tmp_path / "ended").mkdir()
    (ended,) = start_all(commands[-1:], tmp_path / "ended", url).values()
    processes = start_all(commands, tmp_path, url)
    for process in (ended, *processes.values()):
        wait_for_words(process, "it is tried again for up to 60 s")
    assert ended.stop() == 0, ended.said()
    stopped_server.start()
    for name, process in processes.items():
        wait_for_words(process, COMMANDS[name][1])
        if name == "db upgrade":  # it ends by itself; a signal would come in between
            wait_until("it has ended", process.has_ended, PATIENCE_S)
        assert process.stop() == 0, process.said()


def test_a_database_that_does_not_exist_is_not_waited_for(
    server: PostgresServer, tmp_path: Path
) -> None:
    nowhere = server.url("nowhere")
    for name in ("serve", "driver", "db upgrade"):
        words = [*COMMANDS[name][0], "--data-dir", str(tmp_path)]
        ended = run_here(*words, LAYOUT_TUNER_DATABASE_URL=nowhere)
        assert ended.exit_code == 1
        (line,) = ended.output.splitlines()
        assert 'database "nowhere" does not exist; create it with createdb' in line


def test_the_wait_for_a_database_has_an_end(stopped_server: PostgresServer) -> None:
    url = stopped_server.url(TEMPLATE)
    with pytest.raises(DatabaseUnavailableError, match=r"; it was tried for 0\.2 s$"):
        once_it_answers(lambda: Store.connect(url), patience_s=0.2)


@pytest.mark.slow
def test_an_outage_of_the_database_is_two_lines_in_the_log_of_each_process(
    server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = server.url(TEMPLATE)
    monkeypatch.setenv("LAYOUT_TUNER_DATABASE_URL", url)
    with services_sharing(tmp_path, url, 1) as (service,):
        driver = service.driver()
        driver.start()
        wait_for_words(driver, COMMANDS["driver"][1])
        again = ["layout_tuner", "driver", "--data-dir", str(service.data.path)]
        standby = service.make("standby", again)
        standby.start()
        wait_for_words(standby, "standing by")
        processes = (service.serve, driver, standby)
        before = {process.log: process.log.stat().st_size for process in processes}
        server.stop(signal.SIGQUIT)
        try:
            with ThreadPoolExecutor(4) as pool:
                statuses: list[int] = []

                def are_refused() -> bool:
                    asked = pool.map(lambda _: service.http.get("/campaigns"), range(4))
                    statuses.extend(answer.status_code for answer in asked)
                    return statuses.count(503) >= ENOUGH_FAILURES

                wait_until("so many are refused", are_refused, PATIENCE_S)
            for process in processes:
                wait_for_words(process, "cannot be used: ")
        finally:
            server.start()
        for process in processes:
            wait_for_words(process, "works again after ")
        wait_until("all goes on", lambda: service.get("/health")["driver_alive"])
        for process in processes:
            text = process.log.read_bytes()[before[process.log] :].decode()
            lines = [line for line in text.splitlines() if "driver lease" not in line]
            assert len(lines) == 2, text
            assert "the next line about this is written when it works" in lines[0]
            assert "works again after " in lines[1]

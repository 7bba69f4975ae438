"""The processes of the long run: a PostgreSQL, two services, a driver and two workers.

All of them live in one folder, and start there again after any end of the run.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
from sqlalchemy.engine import make_url

from benchmarks.service.live_service import ROOT, LiveProcess, WaitedInVainError, wait_until
from benchmarks.service.postgres_server import FAST, PostgresServer
from layout_tuner.results_db.database.data_dir import DataDir

SERVICES: Final = ("serve-1", "serve-2")
WORKERS: Final = ("worker-1", "worker-2")
DATABASE: Final = "long_run"
PATIENCE_S: Final = 180.0

SIMULATED: Final = ("--simulate", "h100-sxm", "--nodes", "8", "--time-scale", "0.25")
"""Sixteen nodes in all, with about two probes a second: the nodes are what owners wait for."""

VICTIMS: Final = {"serve-1": 2, "driver": 1, "worker-1": 2, "worker-2": 2, "connection": 3}
"""What is struck, and how often beside the others. The second service is never killed: memory and
handles of one process are compared over the whole run."""


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


class Processes:
    """The processes of a run; `state` has their ports and process ids, and is kept."""

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        self.folder = folder
        self.state = state
        self.faults: list[str] = state["faults"]
        """Processes that ended by themselves, or not as they should."""
        place = folder / "postgres"
        place.mkdir(exist_ok=True)
        self.postgres = PostgresServer(place, settings={**FAST, "autovacuum_naptime": "1min"})
        self.url = self.postgres.url(DATABASE)
        self.data = DataDir(folder / "data")
        ports = state.setdefault("ports", [free_port() for _ in (*SERVICES, "receiver")])
        self.urls = [f"http://127.0.0.1:{port}" for port in ports[:2]]
        self.receiver_port = int(ports[2])
        allowed = ("--webhook-hosts", f"http://127.0.0.1:{self.receiver_port}")
        self.live: dict[str, LiveProcess] = {}
        for name, port in zip(SERVICES, ports, strict=False):
            self._make(name, "layout_tuner", "serve", "--port", str(port), *allowed, *self._where)
        self._make("driver", "layout_tuner", "driver", *self._where)
        for name, url in zip(WORKERS, self.urls, strict=True):
            spool = ("--name", name, "--spool-dir", str(self.spool(name)))
            token = ("--token-file", str(self.data.path / "worker-token"))
            program = ("tests.long_run.journaling_worker", str(self.journal(name)))
            self._make(name, *program, "--url", url, *token, *spool, *SIMULATED)

    @property
    def _where(self) -> tuple[str, ...]:
        return "--data-dir", str(self.data.path), "--database", self.url

    def _make(self, name: str, *module_and_arguments: str) -> None:
        self.live[name] = LiveProcess(
            [sys.executable, "-P", "-m", *module_and_arguments],
            environment={**os.environ, "PYTHONPATH": str(ROOT)},
            log=self.folder / f"{name}.log",
        )

    def spool(self, worker: str) -> Path:
        return self.folder / f"spool-{worker}"

    def journal(self, worker: str) -> Path:
        return self.folder / f"journal-{worker}"

    def start(self) -> None:
        """Starts all of them, after the end of those that a killed run has left."""
        self._end_left_overs()
        self._start_database()
        if not self.postgres.execute(f"SELECT 1 FROM pg_database WHERE datname = '{DATABASE}'"):
            self.postgres.execute(f"CREATE DATABASE {DATABASE}")
        for name in self.live:
            self._begin(name)

    def _end_left_overs(self) -> None:
        for name, (pid, created_at) in self.state.get("pids", {}).items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.create_time() == created_at:
                    # A PostgreSQL that is killed leaves its children.
                    process.send_signal(signal.SIGQUIT if name == "postgres" else signal.SIGKILL)
                    process.wait(PATIENCE_S)

    def _begin(self, name: str) -> None:
        self.live[name].start()
        self._note(name, self.live[name].pid)
        if name in SERVICES:
            url = self.urls[SERVICES.index(name)]
            wait_until(f"{name} answers", lambda: self._is_ready(url), PATIENCE_S)

    def _start_database(self) -> None:
        self.postgres.start()
        self._note("postgres", self.postgres.pid)

    def _note(self, name: str, pid: int) -> None:
        self.state.setdefault("pids", {})[name] = (pid, psutil.Process(pid).create_time())

    def _is_ready(self, url: str) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}/v1/ready", trust_env=False).is_success
        return False

    def strike(self, chance: random.Random) -> str:
        """Kills something at random, and starts it again; returns what."""
        victim = chance.choices([*VICTIMS], [*VICTIMS.values()])[0]
        if victim == "connection":
            database = make_url(self.url).database
            self.postgres.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                f" WHERE datname = '{database}' ORDER BY random() LIMIT 2"
            )
        else:
            self.live[victim].kill()
            self._begin(victim)
        return victim

    def restart_database(self) -> None:
        """Ends PostgreSQL as a crash does, and starts it again."""
        self.postgres.stop(signal.SIGQUIT)
        self._start_database()

    def roll(self) -> None:
        """Restarts one service after the other."""
        for name in SERVICES:
            self._end(name)
            self._begin(name)

    def look(self) -> None:
        """Notes processes that ended by themselves, and starts them again."""
        for name, process in self.live.items():
            if process.has_ended():
                self.faults.append(f"{name} ended by itself:\n{process.said()}")
                self._begin(name)

    def _end(self, name: str) -> None:
        process = self.live[name]
        if process.has_ended():
            return
        try:
            code = process.stop()
        except WaitedInVainError as error:
            self.faults.append(str(error))
            process.kill()
        else:
            if code != 0:
                self.faults.append(f"{name} ended with {code}:\n{process.said()}")

    def end(self, *names: str) -> None:
        """Asks processes to end; without names all, and the database after them."""
        for name in names or reversed(self.live):
            self._end(name)
        if not names and self.postgres.is_running:
            self.postgres.stop()


def patiently(what: str, holds: Callable[[], bool], faults: list[str], patience_s: float) -> None:
    """Waits for something; notes it as a fault where it does not come."""
    try:
        wait_until(what, holds, patience_s, pause_s=0.5)
    except WaitedInVainError as error:
        faults.append(str(error))

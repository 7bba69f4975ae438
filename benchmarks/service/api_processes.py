"""Starts api processes as `layout-tuner serve` does, on one database, and measures their memory."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import httpx
import psutil

from benchmarks.service.live_service import ROOT, LiveProcess, WaitedInVainError
from layout_tuner.results_db.database.data_dir import DataDir

_PATIENCE_S: Final = 120.0
_POLL_S: Final = 0.005


class ApiProcess:
    """One of them, on a data directory of its own.

    Args:
        folder: for its data directory and its log.
        name: of the process.
        database: URL; None: SQLite in its data directory.
        program: the `layout-tuner` of another revision's environment; None: this revision's.
    """

    def __init__(
        self, folder: Path, name: str, database: str | None = None, *, program: Path | None = None
    ) -> None:
        self.data = DataDir(folder / f"data-{name}")
        command = ["serve", "--data-dir", str(self.data.path), "--host", "127.0.0.1", "--port", "0"]
        self._is_shared = database is not None
        if database is not None:
            command += ["--database", database]
        self._process = LiveProcess(
            [
                *([str(program)] if program else [sys.executable, "-P", "-m", "layout_tuner"]),
                *command,
            ],
            environment=dict(os.environ) if program else {**os.environ, "PYTHONPATH": str(ROOT)},
            log=folder / f"{name}.log",
        )

    def __enter__(self) -> Self:
        started_s = time.monotonic()
        self._process.start()
        try:
            self._wait_until_it_answers(started_s + _PATIENCE_S)
        except BaseException:
            self._process.kill()
            raise
        self.start_s = time.monotonic() - started_s
        """From its launch to its first answer."""
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.http.close()
        if self._process.has_ended():
            raise WaitedInVainError(f"an api process ended early:\n{self._process.said()}")
        self._process.stop()

    @property
    def address(self) -> tuple[str, int, str]:
        """Host, port and token."""
        return self._url.host, self._url.port or 80, self._token

    @property
    def memory_bytes(self) -> int:
        """What it holds resident."""
        return int(psutil.Process(self._process.pid).memory_info().rss)

    @property
    def cpu_s(self) -> float:
        """Processor seconds since it started."""
        times = psutil.Process(self._process.pid).cpu_times()
        return times.user + times.system

    def post(self, path: str, body: Any) -> Any:
        answer = self.http.post(path, json=body)
        answer.raise_for_status()
        return answer.json()

    def _wait_until_it_answers(self, deadline_s: float) -> None:
        while not self._answers():
            if self._process.has_ended() or time.monotonic() > deadline_s:
                raise WaitedInVainError(f"an api process does not answer:\n{self._process.said()}")
            time.sleep(_POLL_S)

    def _answers(self) -> bool:
        # Not by `find_service`: it tries the lock that the process is about to take.
        own = self.data.path / f"service-{self._process.pid}.json"
        try:
            announced = json.loads(
                (own if self._is_shared else self.data.service_file).read_bytes()
            )
            if announced["pid"] != self._process.pid:
                return False
            self._url = httpx.URL(announced["url"])
            self._token = self.data.token_file.read_text().strip()
            self.http = httpx.Client(
                base_url=self._url.join("/v1"),
                headers={"Authorization": f"Bearer {self._token}"},
                timeout=60,
            )
            return self.http.get("/health").status_code == 200
        except (OSError, ValueError, httpx.TransportError):
            return False


def processor_seconds(pids: Sequence[int]) -> float:
    """Of these processes and their children, as far as they live."""
    total = 0.0
    for pid in pids:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            # Of children that were reaped too: PostgreSQL has a process a connection.
            total += times.user + times.system + times.children_user + times.children_system
    return total

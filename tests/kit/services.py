"""A real service in a process of its own."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result

from layout_tuner.cli.main import main
from layout_tuner.protocol.connection.running_service import find_service
from tests.kit.waiting import wait_until


def run_command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "layout_tuner", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def run_here(*arguments: str, **environment: str) -> Result:
    """A command in this process, which is faster: for one that is refused before it starts."""
    loggers = [logging.getLogger(name) for name in ("layout_tuner", "uvicorn")]
    before = [(logger.handlers, logger.level) for logger in loggers]
    umask = os.umask(0o022)
    handlers_of_signals = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        return CliRunner().invoke(main, arguments, env=environment, catch_exceptions=False)
    finally:
        os.umask(umask)
        for number, handler in handlers_of_signals.items():
            signal.signal(number, handler)
        for logger, (handlers, level) in zip(loggers, before, strict=True):
            logger.handlers = handlers
            logger.setLevel(level)


class ServeProcess:
    """`layout-tuner serve` on a data directory; can be killed and started again."""

    def __init__(self, data_dir: Path, *options: str, umask: int = -1) -> None:
        self.data_dir = data_dir
        self.process: subprocess.Popen[str] | None = None
        self.printed = ""
        """All that it printed, from its end on."""
        self._options = options
        self.start(umask=umask)

    def start(self, port: str = "0", umask: int = -1) -> None:
        command = ["serve", "--port", port, "--data-dir", str(self.data_dir), *self._options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "layout_tuner", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            umask=umask,
        )
        self.service = wait_until("the service has said where it is", self._read_service)
        self.url = str(self.service["url"])
        self.token = (self.data_dir / "token").read_text().strip()
        self.headers = {"Authorization": f"Bearer {self.token}"}
        self.http = httpx.Client(base_url=f"{self.url}/v1", headers=self.headers)

    def _read_service(self) -> Any:
        if self.process.poll() is not None:
            pytest.fail(f"the service ended: {self.process.communicate()[0]}")
        found = find_service(self.data_dir, pid=self.process.pid)
        return None if found is None else {"url": found.url, "pid": found.pid}

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal if it still runs, and waits; returns the exit code."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(number)
        if not self.process.stdout.closed:
            self.printed = self.process.communicate(timeout=30)[0]
        return self.process.returncode

    def post(self, path: str, body: Any = None) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.is_success, answer.text
        return answer.json()

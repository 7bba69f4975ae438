"""The whole service, for real: `layout-tuner up` in its own process, over loopback HTTP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.kit.campaigns import space_of
from tests.kit.waiting import wait_until
from tests.workers.process_checks import MARK, command_line, kill, living_children, marked

COMMAND = str(Path(sys.executable).with_name("layout-tuner"))

CAMPAIGN: dict[str, Any] = {
    "name": "e2e",
    "model": "tiny",
    "cluster": "local-cpu",
    "objective": "tokens_per_s",
    "strategy": "random",
    "budget": {"trials": 10},
    "probe": {"warmup": 2, "iterations": 4, "deadline": "60s"},
    "space": space_of(
        global_batch_size=8,
        tp=[1, 2],
        pp=[1, 2],
        dp=[1, 2],
        micro_batch_size=[1, 2, 4],
        zero_stage=[0, 1],
    ),
}


def _module_and_command(process: psutil.Process) -> list[str]:
    """What stands behind python's -m."""
    words = command_line(process)
    return words[words.index("-m") + 1 :][:2] if "-m" in words else []


class Service:
    """A service on a data directory; can be killed and started again."""

    def __init__(
        self,
        data_dir: Path,
        *options: str,
        command: str = COMMAND,
        cwd: Path | None = None,
    ) -> None:
        self.options = options
        self.data_dir = data_dir
        self.command, self.cwd = command, cwd
        self.mark = uuid.uuid4().hex
        self.environment = {
            **os.environ,
            MARK: self.mark,
            "LAYOUT_TUNER_DATA_DIR": str(data_dir),
        }
        self.output = data_dir.parent / "up.log"
        self.http = httpx.Client()

    def start(self) -> None:
        with self.output.open("ab") as output:
            self.printed_before = output.tell()
            self.up = subprocess.Popen(
                [self.command, "up", "--port", "0", *self.options],
                env=self.environment,
                cwd=self.cwd,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        wait_until("the service is up", self._greeted)
        printed = self.output.read_text().splitlines()
        url = [line.split()[-1] for line in printed if "layout-tuner is up at" in line][-1]
        token = (self.data_dir / "token").read_text().strip()
        self.http.close()
        self.http = httpx.Client(
            base_url=f"{url}/v1", headers={"Authorization": f"Bearer {token}"}, timeout=30
        )

    def _greeted(self) -> bool:
        if self.up.poll() is not None:
            pytest.fail(f"layout-tuner up ended:\n{self.output.read_text()}")
        return "Starting the driver" in self.output.read_text()[self.printed_before :]

    def answers(self) -> bool:
        """Whether the HTTP service is there."""
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        if self.up.poll() is None:
            self.up.send_signal(signal.SIGINT)
            assert self.up.wait(60) == 0, self.output.read_text()

    def processes(self) -> list[psutil.Process]:
        """Every living process that descends from this service, however it was started."""
        return marked(self.mark)

    def named(self, command: str) -> list[psutil.Process]:
        """The processes that run a subcommand."""
        return [
            process
            for process in self.processes()
            if ["layout_tuner", command] == _module_and_command(process)
        ]

    def process(self, command: str) -> psutil.Process:
        """The one process that runs a subcommand."""
        (found,) = self.named(command)
        return found

    def ranks(self) -> list[psutil.Process]:
        """The living ranks: children of the zygotes' keepers."""
        zygotes = [
            p
            for p in self.processes()
            if _module_and_command(p)[:1] == ["layout_tuner.workers.ranks.zygote"]
        ]
        return [
            rank
            for zygote in zygotes
            for keeper in living_children(zygote)
            for rank in living_children(keeper)
        ]

    def logs(self) -> str:
        return "\n".join(
            f"--- {log.name}\n{log.read_text()[-3000:]}"
            for log in sorted((self.data_dir / "logs").glob("*.log"))
        )

    def get(self, path: str, **query: Any) -> Any:
        answer = self.http.get(path, params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def submit(self, **changes: Any) -> dict[str, Any]:
        answer = self.http.post("/campaigns", json={**CAMPAIGN, **changes})
        assert answer.status_code == 201, answer.text
        return answer.json()

    def trials(self, campaign: str, **query: Any) -> list[dict[str, Any]]:
        return self.get(f"/campaigns/{campaign}/trials", limit=200, **query)["trials"]

    def wait_for_completed(self, campaign: str, number: int) -> list[dict[str, Any]]:
        def enough() -> list[dict[str, Any]] | None:
            completed = self.trials(campaign, state="COMPLETED")
            return completed if len(completed) >= number else None

        return wait_until(f"{number} trials are completed", enough, 240)

    def wait_for_end(self, campaign: str) -> dict[str, Any]:
        def ended() -> dict[str, Any] | None:
            read: dict[str, Any] = self.get(f"/campaigns/{campaign}")
            return read if read["state"] not in ("RUNNING", "PAUSED") else None

        return wait_until(f"campaign {campaign} has ended", ended, 110)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of the command line, against this service."""
        return subprocess.run(
            [self.command, *arguments],
            env=self.environment,
            cwd=self.cwd,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )

    def done(self, *arguments: str) -> str:
        """What a command prints that ends well."""
        ended = self.run(*arguments)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout


@contextmanager
def started(service: Service) -> Iterator[Service]:
    """Whatever a test does to the service, no process may outlive it."""
    service.start()
    try:
        yield service
        service.stop()
        wait_until("every process of the service is gone", lambda: not service.processes(), 30)
    finally:
        service.http.close()
        kill(service.processes())


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A fresh service."""
    with started(Service(tmp_path / "data")) as service:
        yield service

"""A service and its workers as processes of their own, for benchmarks and for tests of faults.

They are the product's own commands on a data directory of their own. All of them, and whatever they
start, carry a mark in their environment, so that what is left of them can be counted.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import httpx
import psutil

from layout_tuner.protocol.connection.running_service import find_service
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.records import TrialDetail
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout

ROOT: Final = Path(__file__).resolve().parents[2]
MARK: Final = "LAYOUT_TUNER_MARK"

_STOP_WITHIN_S: Final = 60.0
_ENDED: Final = ("COMPLETED", "INFEASIBLE", "FAILED", "CANCELLED")

T = TypeVar("T")


class WaitedInVainError(Exception):
    """Something did not happen in time."""


def wait_until(
    what: str, condition: Callable[[], T], patience_s: float = 120.0, pause_s: float = 0.05
) -> T:
    """The first true answer of `condition`.

    Raises:
        WaitedInVainError: there was none in time.
    """
    give_up_at = time.monotonic() + patience_s
    while not (answer := condition()):
        if time.monotonic() > give_up_at:
            raise WaitedInVainError(f"waited {patience_s:g} s in vain until {what}")
        time.sleep(pause_s)
    return answer


class LiveProcess:
    """A command that can be killed and started again.

    Args:
        command: what to run.
        environment: the whole of its environment.
        log: where its output goes; appended to.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str], log: Path
    ) -> None:
        self.command = list(command)
        self.environment = dict(environment)
        self.log = log
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Starts it."""
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def kill(self) -> None:
        """SIGKILL, and waits for it."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, within_s: float = _STOP_WITHIN_S) -> int:
        """Asks it to end, and waits; returns its exit code.

        Raises:
            WaitedInVainError: it does not end.
        """
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired as error:
            raise WaitedInVainError(
                f"{self.command} did not end in {within_s:g} s:\n{self.said()}"
            ) from error

    def said(self, last: int = 3000) -> str:
        """The end of what it printed."""
        return self.log.read_text(errors="replace")[-last:] if self.log.exists() else ""


class LiveService:
    """`layout-tuner serve` on a data directory, and the driver and workers that belong to it.

    Args:
        folder: an empty directory, for data and logs.
        host: address that it listens on.
        environment: variables for the service beyond this process's.
        data_dir: where it keeps its data; None: in the folder.
    """

    def __init__(
        self,
        folder: Path,
        *,
        host: str = "127.0.0.1",
        environment: Mapping[str, str] | None = None,
        data_dir: Path | None = None,
    ) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.environment = {**os.environ, MARK: self.mark, "PYTHONPATH": str(ROOT)}
        self.data = DataDir(data_dir or folder / "data")
        self.http = httpx.Client()
        self._num_campaigns = 0
        self._processes: list[LiveProcess] = []
        # Beyond loopback it must be told that somebody else protects what is said.
        trusted = [] if host.startswith("127.") else ["--behind-proxy"]
        where = ["--data-dir", str(self.data.path), "--host", host]
        command = ["serve", *trusted, *where, "--port", "0"]
        self.serve = self.make("serve", ["layout_tuner", *command], environment or {})

    def __enter__(self) -> Self:
        try:
            self.start()
            self.store = Store.open(self.data)
        except BaseException:
            self._kill_all()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.store.close()
            self.http.close()
        finally:
            self._kill_all()

    def make(
        self,
        name: str,
        module_and_arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        prefix: Sequence[str] = (),
    ) -> LiveProcess:
        """A process of this service, not started yet; it does not outlive this object.

        Args:
            name: of its log.
            module_and_arguments: what stands behind python's -m.
            environment: variables beyond the service's.
            prefix: a command that runs it, such as `ip netns exec NAME`.
        """
        process = LiveProcess(
            [*prefix, sys.executable, "-P", "-m", *module_and_arguments],
            environment={**self.environment, **(environment or {})},
            log=self.folder / f"{name}.log",
        )
        self._processes.append(process)
        return process

    def start(self) -> None:
        """Starts it, or starts it again on the port that it had; returns when it answers."""
        self.serve.start()
        wait_until("the service answers", self._answers)
        self.serve.command[-1] = str(httpx.URL(self.url).port)

    def _answers(self) -> bool:
        if self.serve.has_ended():
            raise WaitedInVainError(f"the service ended:\n{self.serve.said()}")
        announced = find_service(self.data.path, pid=self.serve.pid)
        if announced is None:
            return False
        self.url: str = announced.url
        token = self.data.token_file.read_text().strip()
        self.http.close()
        self.http = httpx.Client(
            base_url=f"{self.url}/v1", headers={"Authorization": f"Bearer {token}"}, timeout=30
        )
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def worker(
        self,
        name: str = "w1",
        *,
        rank_entry: str | None = None,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        spool_dir: Path | None = None,
        options: Sequence[str] = (),
    ) -> LiveProcess:
        """A worker of this service, not started yet.

        Args:
            name: of the worker.
            rank_entry: what ranks run; None: probes, by the product's own command.
            environment: variables beyond the service's.
            prefix: a command that runs it.
            spool_dir: where outcomes wait; None: in the folder.
            options: more options of the command.
        """
        spool = spool_dir or self.folder / f"spool-{name}"
        where = ["--url", self.url, "--token-file", str(self.data.token_file)]
        program = (
            ["layout_tuner", "worker"] if rank_entry is None else ["benchmarks.workers.live_worker"]
        )
        entry = [] if rank_entry is None else ["--rank-entry", rank_entry]
        named = ["--name", name, "--spool-dir", str(spool)]
        return self.make(
            name, [*program, *where, *named, *entry, *options], environment, prefix=prefix
        )

    def driver(self) -> LiveProcess:
        """The driver on this service's data directory, not started yet."""
        return self.make("driver", ["layout_tuner", "driver", "--data-dir", str(self.data.path)])

    def post(self, path: str, body: Any = None) -> Any:
        answer = self.http.post(path, json=body)
        answer.raise_for_status()
        return answer.json()

    def get(self, path: str, **query: Any) -> Any:
        answer = self.http.get(path, params=query)
        answer.raise_for_status()
        return answer.json()

    def submit(self, **changes: Any) -> dict[str, Any]:
        """Creates a campaign by its document."""
        self._num_campaigns += 1
        document = {
            "name": f"c{self._num_campaigns}",
            "model": "tiny",
            "cluster": "local-cpu",
            "strategy": "random",
            "objective": "tokens_per_s",
            "budget": {"trials": 100},
            "probe": {"warmup": 2, "iterations": 2, "deadline": "60s"},
            "space": {
                "dp": [1, 2],
                "global_batch_size": 8,
                "tp": 1,
                "pp": 1,
                "micro_batch_size": 1,
                "zero_stage": 0,
            },
        }
        created: dict[str, Any] = self.post("/campaigns", {**document, **changes})
        return created

    def add(self, layout: Layout, **changes: Any) -> int:
        """A campaign of one trial of this layout, which waits; where no driver runs. Its id."""
        campaign = self.submit(**changes)
        return self.store.trials.add(campaign["id"], layout).id

    def trial(self, trial_id: int) -> TrialDetail:
        """All that is known of a trial."""
        return self.store.trials.detail(trial_id)

    def wait_for_end(self, trial_ids: Sequence[int], patience_s: float = 300.0) -> None:
        """Waits until trials have ended, however they did.

        Raises:
            WaitedInVainError: they did not in time.
        """
        left = set(trial_ids)

        def none_left() -> bool:
            left.difference_update(i for i in [*left] if self.store.trials.get(i).state in _ENDED)
            return not left

        wait_until(f"trials {trial_ids} have ended", none_left, patience_s)

    def processes(self) -> list[psutil.Process]:
        """Every living process that descends from this service and its workers."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != "zombie":
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def _kill_all(self) -> None:
        for process in self._processes:
            if not process.has_ended():
                process.kill()
        for left in self.processes():
            # One that was killed takes its children along.
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()

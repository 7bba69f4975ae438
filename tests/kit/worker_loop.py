"""A worker in the test's own thread or in a process: its service over real HTTP, and its trials."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layout_tuner.protocol.outcome import Outcome, ProbeRequest
from layout_tuner.protocol.worker_messages import OutcomeReport, WorkerCreate
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.launchers.launcher_nodes import Cancelled, OnEvent
from layout_tuner.workers.packing.request import Placement
from layout_tuner.workers.service.lease_client import LeaseClient
from layout_tuner.workers.worker.outcome_posting import Outbox
from layout_tuner.workers.worker.outcome_spool import Spool
from layout_tuner.workers.worker.scheduler import SchedulerOptions
from layout_tuner.workers.worker.worker import CheckOf, Drain, EndsIn, Worker
from tests.kit.fake_launcher import FakeLauncher, PlacedProgram, Program
from tests.kit.fake_service import TOKEN, FakeService
from tests.kit.python_process import environment_with, python_words
from tests.kit.waiting import wait_until

IDENTITY = WorkerCreate(
    name="w",
    host="h",
    cluster="local-cpu",
    num_nodes=1,
    devices_per_node=2,
    device="CPU core",
    versions={"python": "3.11"},
)
FAILED = Outcome(state="failed", reason="crashed", message="rank 0: no luck")
CANCELLED = Outcome(state="cancelled", reason="cancelled", message="asked to")
DONE = Outcome(state="infeasible", reason="out_of_memory", message="a result that nobody doubts")
ONE_NODE = SchedulerOptions(share_nodes=False, drain_s=1.0)
SHARED = SchedulerOptions(share_nodes=True, drain_s=0.5)


def make_request(num_devices: int = 2, num_nodes: int = 1, **changes: Any) -> dict[str, Any]:
    """A probe of the tiny model over so many devices in all."""
    layout = Layout(num_nodes=num_nodes, dp=num_devices)
    return ProbeRequest(model=model_preset("tiny"), layout=layout, **changes).to_mapping()


def make_report(trial_id: int = 7) -> OutcomeReport:
    outcome = Outcome(state="failed", reason="crashed", message="ß")
    return OutcomeReport(trial_id=trial_id, attempt=2, worker_id="w", outcome=outcome)


def fail(_on_event: OnEvent, _cancelled: Cancelled) -> Outcome:
    return FAILED


def run_until_cancelled(on_event: OnEvent, cancelled: Cancelled) -> Outcome:
    on_event({"event": "iteration", "index": 4})
    wait_until("the probe is cancelled", cancelled)
    return CANCELLED


def ends_when(condition: Callable[[], Any]) -> PlacedProgram:
    """A probe that holds its devices until a condition holds, or it is cancelled."""

    def run(_r: ProbeRequest, _p: Placement, on_event: OnEvent, cancelled: Cancelled) -> Outcome:
        on_event({"event": "iteration", "index": 0, "step_time_s": 0.01})
        wait_until("the probe may end", lambda: condition() or cancelled(), 30)
        return CANCELLED if cancelled() else DONE

    return run


def launcher_of(*sizes: int, ends: Callable[[], Any] = lambda: True) -> FakeLauncher:
    """Nodes of so many devices, whose probes hold them until a condition holds."""
    return FakeLauncher(placed=ends_when(ends), sizes=sizes)


class WorkedService(FakeService):
    """The small service, and the worker that a test runs for it.

    Args:
        spool_dir: where the worker keeps its outcomes.
    """

    def __init__(self, spool_dir: Path) -> None:
        super().__init__()
        self.spool_dir = spool_dir

    def add(
        self, *trial_ids: int, num_devices: int = 2, num_nodes: int = 1, **changes: Any
    ) -> None:
        for trial_id in trial_ids:
            self.add_trial(trial_id, make_request(num_devices, num_nodes, **changes))

    def work(
        self,
        program: Program | FakeLauncher = fail,
        *,
        until: Callable[[], Any],
        token: str = TOKEN,
        patience_s: float = 5.0,
        options: SchedulerOptions = ONE_NODE,
        ends_in_s: EndsIn | None = None,
        check: CheckOf | None = None,
        identity: WorkerCreate = IDENTITY,
        start_launcher: Callable[[], GroupLauncher] | None = None,
    ) -> FakeLauncher:
        """Runs a worker in this thread until a condition ends it; returns its launcher."""
        launcher = program if isinstance(program, FakeLauncher) else FakeLauncher(program)
        drain = Drain()
        with LeaseClient(self.url, token) as client, Spool(self.spool_dir) as spool:
            worker = Worker(
                client=client,
                identity=identity,
                start_launcher=start_launcher or (lambda: launcher),
                outbox=Outbox(client, spool),
                drain=drain,
                options=options,
                ends_in_s=ends_in_s,
                check=check,
            )
            with _terminated_when(until):
                drain.listen()
                worker.run(patience_s=patience_s)
        return launcher

    def share(self, launcher: FakeLauncher, *, until: Callable[[], Any], **options: Any) -> None:
        """Runs a worker whose trials share nodes."""
        self.work(launcher, until=until, options=SHARED, **options)

    def posted(self) -> dict[int, dict[str, Any]]:
        """The outcomes by trial."""
        return {body["trial_id"]: body["outcome"] for body in self.outcomes}

    def beats(self) -> dict[int, dict[str, Any]]:
        """What the latest heartbeat says of each trial."""
        return {beat["trial_id"]: beat for body in self.heartbeats[-1:] for beat in body["trials"]}

    def kept(self) -> list[str]:
        """The names of the outcomes that the worker keeps."""
        return sorted(path.name for path in self.spool_dir.glob("*.json"))


@contextmanager
def running_worker(
    service: WorkedService, *options: str, **variables: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in a process of its own; the fixture `mark` finds whatever it leaves behind."""
    folder = service.spool_dir.parent
    (folder / "token").write_text(TOKEN + "\n")
    words = ["--url", service.url, "--token-file", str(folder / "token")]
    words += ["--spool-dir", str(service.spool_dir), *options]
    program = python_words("from layout_tuner.cli.processes.worker import worker; worker()", *words)
    with log_of(service).open("w") as log:
        worker = subprocess.Popen(program, env=environment_with(variables), stderr=log)
        try:
            yield worker
        except BaseException as error:
            error.add_note(log_of(service).read_text()[-6000:])
            raise
        finally:
            worker.kill()
            worker.wait()


def log_of(service: WorkedService) -> Path:
    """What the worker of a process of its own logs."""
    return service.spool_dir.parent / "worker.log"


@contextmanager
def _terminated_when(condition: Callable[[], Any]) -> Iterator[None]:
    """Sends this process SIGTERM once a condition holds, as a supervisor would."""
    stop = threading.Event()

    def watch() -> None:
        while not condition() and not stop.is_set():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=watch)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        for number, handler in before.items():
            signal.signal(number, handler)

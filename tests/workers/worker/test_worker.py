"""The worker's loop against a real HTTP service, with a launcher that does as it is told."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from search_spaces.protocol.outcome import Outcome, ProbeRequest
from search_spaces.protocol.worker_messages import OutcomeReport
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.models import model_preset
from tests.kit.waiting import wait_until
from tests.workers.fake_launcher import FakeLauncher, Program
from tests.workers.fake_service import TOKEN, FakeService
from tests.workers.service.test_lease_client import IDENTITY
from workers.errors import (
    RanksLeftError,
    ServiceUnreachableError,
    TokenRefusedError,
    WorkerReplacedError,
)
from workers.launchers.base import Cancelled, OnEvent
from workers.launchers.group_launcher import GroupLauncher
from workers.service.lease_client import EncodedOutcome, LeaseClient
from workers.worker.outcome_posting import Outbox
from workers.worker.outcome_spool import Spool
from workers.worker.scheduler import SchedulerOptions
from workers.worker.worker import CheckOf, Drain, EndsIn, Worker

REQUEST = ProbeRequest(model=model_preset("tiny"), layout=Layout(tp=2)).to_mapping()
FAILED = Outcome(state="failed", reason="crashed", message="rank 0: no luck")
ONE_NODE = SchedulerOptions(share_nodes=False, drain_s=1.0)
CANCELLED = Outcome(state="cancelled", reason="cancelled", message="asked to")


def fail(_on_event: OnEvent, _cancelled: Cancelled) -> Outcome:
    return FAILED


def run_until_cancelled(on_event: OnEvent, cancelled: Cancelled) -> Outcome:
    on_event({"event": "iteration", "index": 4})
    wait_until("the probe is cancelled", cancelled)
    return CANCELLED


def node_states(service: FakeService) -> dict[str, str]:
    """The nodes' states by the latest heartbeat."""
    bodies = service.heartbeats[-1:]
    return {n["name"]: n["state"] for body in bodies for n in body["status"]["nodes"]}


@contextmanager
def end_when(condition: Callable[[], Any]) -> Iterator[None]:
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


def work(
    service: FakeService,
    spool_dir: Path,
    program: Program | FakeLauncher,
    *,
    until: Callable[[], Any],
    token: str = TOKEN,
    patience_s: float = 5.0,
    options: SchedulerOptions = ONE_NODE,
    ends_in_s: EndsIn | None = None,
    check: CheckOf | None = None,
) -> FakeLauncher:
    """Runs a worker in this thread until a condition ends it."""
    launcher = program if isinstance(program, FakeLauncher) else FakeLauncher(program)
    drain = Drain()
    with LeaseClient(service.url, token) as client, Spool(spool_dir) as spool:
        worker = Worker(
            client=client,
            identity=IDENTITY,
            start_launcher=lambda: launcher,
            outbox=Outbox(client, spool),
            drain=drain,
            options=options,
            ends_in_s=ends_in_s,
            check=check,
        )
        with end_when(until):
            drain.listen()
            worker.run(patience_s=patience_s)
    return launcher


def test_a_trial_is_run_and_its_outcome_posted_once(service: FakeService, tmp_path: Path) -> None:
    service.add_trial(7, REQUEST)
    launcher = work(service, tmp_path, fail, until=lambda: service.outcomes)
    assert launcher.requests == [ProbeRequest.from_mapping(REQUEST)]
    (posted,) = service.outcomes
    assert (posted["trial_id"], posted["attempt"]) == (7, 1)
    assert posted["worker_id"] == "session-1"
    assert posted["outcome"] == FAILED.to_mapping()
    assert service.unregistered == ["session-1"]
    assert launcher.closed
    assert not list(tmp_path.glob("*.json"))


def test_heartbeats_tell_how_far_the_trial_is(service: FakeService, tmp_path: Path) -> None:
    def is_told() -> bool:
        beats = [beat for body in service.heartbeats for beat in body["trials"]]
        return any(beat["trial_id"] == 7 and beat["iterations_done"] == 5 for beat in beats)

    service.add_trial(7, REQUEST)
    work(service, tmp_path, run_until_cancelled, until=is_told)


def test_a_trial_that_the_service_stops_is_ended_and_reported(
    service: FakeService, tmp_path: Path
) -> None:
    service.add_trial(7, REQUEST)
    service.stop = [7]
    work(service, tmp_path, run_until_cancelled, until=lambda: service.outcomes)
    assert service.outcomes[0]["outcome"]["state"] == "cancelled"


def test_a_drained_worker_ends_its_probe_and_returns_the_lease(
    service: FakeService, tmp_path: Path
) -> None:
    service.add_trial(7, REQUEST)
    started = time.monotonic()
    launcher = work(
        service, tmp_path, run_until_cancelled, until=lambda: len(service.heartbeats) > 1
    )
    assert launcher.requests
    assert service.outcomes == []
    assert service.unregistered == ["session-1"]
    assert time.monotonic() - started < 15


def test_a_worker_that_waits_for_work_ends_at_once(service: FakeService, tmp_path: Path) -> None:
    started = time.monotonic()
    work(service, tmp_path, fail, until=lambda: len(service.heartbeats) > 1)
    assert time.monotonic() - started < 15
    assert service.unregistered == ["session-1"]


def test_a_worker_whose_nodes_do_not_come_up_ends_at_once(
    service: FakeService, tmp_path: Path
) -> None:
    begun = threading.Event()

    def wait_for_nodes() -> GroupLauncher:
        begun.set()
        # Short sleeps: a signal between Python's check and the call does not end the call.
        for _ in range(600):
            time.sleep(0.1)
        raise AssertionError("nobody has asked it to end")

    started = time.monotonic()
    drain = Drain()
    with LeaseClient(service.url, TOKEN) as client, Spool(tmp_path) as spool:
        worker = Worker(
            client=client,
            identity=IDENTITY,
            start_launcher=wait_for_nodes,
            outbox=Outbox(client, spool),
            drain=drain,
            options=ONE_NODE,
        )
        with end_when(begun.is_set):
            drain.listen()
            worker.run(patience_s=5.0)
    assert time.monotonic() - started < 30
    assert service.unregistered == ["session-1"]


def test_a_worker_that_is_forgotten_registers_again(service: FakeService, tmp_path: Path) -> None:
    def forget_once() -> bool:
        if service.heartbeats and len(service.registrations) == 1:
            service.forget_worker()
        return len(service.registrations) == 2 and service.live_worker == "session-2"

    work(service, tmp_path, fail, until=forget_once)
    assert service.unregistered == ["session-2"]


def test_an_outcome_is_posted_when_the_service_is_back(
    service: FakeService, tmp_path: Path
) -> None:
    def leave(_on_event: OnEvent, _cancelled: Cancelled) -> Outcome:
        service.away = True
        threading.Timer(0.5, lambda: setattr(service, "away", False)).start()
        return FAILED

    service.add_trial(7, REQUEST)
    work(service, tmp_path, leave, until=lambda: service.outcomes)
    assert len(service.outcomes) == 1


def test_an_outcome_of_a_killed_worker_is_posted_by_the_next(
    service: FakeService, tmp_path: Path
) -> None:
    with Spool(tmp_path) as spool:
        report = OutcomeReport(trial_id=5, attempt=2, worker_id="session-0", outcome=FAILED)
        spool.keep(EncodedOutcome.of(report))
    work(service, tmp_path, fail, until=lambda: service.outcomes)
    (posted,) = service.outcomes
    assert (posted["trial_id"], posted["attempt"], posted["worker_id"]) == (5, 2, "session-0")
    assert not list(tmp_path.glob("*.json"))


def test_an_outcome_is_kept_when_the_service_stays_away(
    service: FakeService, tmp_path: Path
) -> None:
    def leave(_on_event: OnEvent, _cancelled: Cancelled) -> Outcome:
        service.away = True
        return FAILED

    service.add_trial(7, REQUEST)
    work(service, tmp_path, leave, until=lambda: list(tmp_path.glob("*.json")))
    assert [path.name for path in tmp_path.glob("*.json")] == ["trial-7-attempt-1.json"]


def test_an_outcome_that_finds_no_place_on_disk_is_posted_all_the_same(
    service: FakeService, tmp_path: Path
) -> None:
    def lose_the_disk(_on_event: OnEvent, _cancelled: Cancelled) -> Outcome:
        shutil.rmtree(tmp_path / "spool")
        return FAILED

    service.add_trial(7, REQUEST)
    work(service, tmp_path / "spool", lose_the_disk, until=lambda: service.outcomes)
    assert [outcome["trial_id"] for outcome in service.outcomes] == [7]


def test_a_refused_outcome_is_set_aside_and_work_goes_on(
    service: FakeService, tmp_path: Path
) -> None:
    service.refuse_outcomes = True
    service.add_trial(7, REQUEST)
    aside = tmp_path / "rejected" / "trial-7-attempt-1.json"
    work(service, tmp_path, fail, until=aside.exists)
    assert service.unregistered == ["session-1"]


def test_an_outcome_that_breaks_the_service_holds_up_neither_others_nor_work(
    service: FakeService, tmp_path: Path
) -> None:
    service.breaks_over = {1}
    service.add_trial(1, REQUEST)
    service.add_trial(2, REQUEST)
    work(service, tmp_path, fail, until=lambda: service.outcomes)
    assert [outcome["trial_id"] for outcome in service.outcomes] == [2]
    assert [path.name for path in tmp_path.glob("*.json")] == ["trial-1-attempt-1.json"]
    assert service.unregistered == ["session-1"]


def test_an_outcome_that_broke_the_service_is_posted_again_later(
    service: FakeService, tmp_path: Path
) -> None:
    service.breaks_over = {1}
    service.add_trial(1, REQUEST)
    service.add_trial(2, REQUEST)

    def repair_once() -> bool:
        if service.outcomes:
            service.breaks_over = set()
        return len(service.outcomes) == 2

    work(service, tmp_path, fail, until=repair_once)
    assert [outcome["trial_id"] for outcome in service.outcomes] == [2, 1]


def test_a_worker_whose_name_is_taken_over_ends_its_probe_and_says_so(
    service: FakeService, tmp_path: Path
) -> None:
    def be_superseded(on_event: OnEvent, cancelled: Cancelled) -> Outcome:
        with LeaseClient(service.url, TOKEN) as other:
            other.register(IDENTITY)
        return run_until_cancelled(on_event, cancelled)

    service.add_trial(7, REQUEST)
    with pytest.raises(WorkerReplacedError, match="another worker has registered as w; give"):
        work(service, tmp_path, be_superseded, until=lambda: False)
    assert len(service.registrations) == 2
    assert service.outcomes == []
    assert service.live_worker == "session-2"


def test_a_worker_whose_name_is_taken_over_while_it_waits_says_so(
    service: FakeService, tmp_path: Path
) -> None:
    def supersede() -> None:
        wait_until("the worker waits", lambda: service.heartbeats)
        with LeaseClient(service.url, TOKEN) as other:
            other.register(IDENTITY)

    other = threading.Thread(target=supersede)
    other.start()
    with pytest.raises(WorkerReplacedError):
        work(service, tmp_path, fail, until=lambda: False)
    other.join()
    assert len(service.registrations) == 2


def test_a_heartbeat_that_hangs_gives_way_to_the_next(service: FakeService, tmp_path: Path) -> None:
    service.stalls = True
    work(service, tmp_path, fail, until=lambda: len(service.heartbeats) > 1)
    assert service.answered_heartbeats == 0, "the second one came while the first had no answer"
    service.stalls = False


def test_heartbeats_go_on_after_an_answer_that_can_not_be_decoded(
    service: FakeService, tmp_path: Path
) -> None:
    service.garbles = False
    told: list[int] = []

    def garble_once() -> bool:
        if not told and service.heartbeats:
            told.append(len(service.heartbeats))
            service.garbles = True
        if told and len(service.heartbeats) > told[0] + 1:
            service.garbles = False
        return bool(told) and len(service.heartbeats) > told[0] + 4

    work(service, tmp_path, fail, until=garble_once)
    assert service.unregistered == ["session-1"]


def test_a_request_that_is_not_understood_is_an_unsupported_trial(
    service: FakeService, tmp_path: Path
) -> None:
    service.add_trial(7, {**REQUEST, "colour": "green"})
    launcher = work(service, tmp_path, fail, until=lambda: service.outcomes)
    assert launcher.requests == []
    assert service.outcomes[0]["outcome"]["reason"] == "unsupported"
    assert "colour" in service.outcomes[0]["outcome"]["message"]


def test_a_node_that_cannot_be_cleaned_is_quarantined_and_its_trial_runs_elsewhere(
    service: FakeService, tmp_path: Path
) -> None:
    def leave_a_process(_on_event: OnEvent, _cancelled: Cancelled) -> Outcome:
        raise RanksLeftError("processes [1] are still there")

    service.add_trial(7, REQUEST)
    service.add_trial(8, REQUEST)
    launcher = work(
        service,
        tmp_path,
        leave_a_process,
        until=lambda: service.outcomes and node_states(service).get("n0") == "quarantined",
    )
    (posted,) = service.outcomes
    assert (posted["outcome"]["reason"], posted["outcome"]["node"]) == ("node_lost", "n0")
    assert len(launcher.requests) == 1
    assert service.unregistered == ["session-1"]


def test_a_wrong_token_ends_the_worker(service: FakeService, tmp_path: Path) -> None:
    with pytest.raises(TokenRefusedError):
        work(service, tmp_path, fail, until=lambda: False, token="wrong")


def test_an_absent_service_ends_the_worker_when_patience_runs_out(
    service: FakeService, tmp_path: Path
) -> None:
    service.away = True
    with pytest.raises(ServiceUnreachableError, match="503"):
        work(service, tmp_path, fail, until=lambda: False, patience_s=0.3)


def test_a_worker_that_is_interrupted_while_it_asks_for_its_role_unregisters(
    service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_client: LeaseClient) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(LeaseClient, "role", interrupted)
    with pytest.raises(KeyboardInterrupt):
        work(service, tmp_path, fail, until=lambda: service.unregistered)
    assert service.unregistered == ["session-1"]

"""The worker's loop against a real HTTP service, with a launcher that does as it is told."""

from __future__ import annotations

import threading
import time

import pytest

from search_spaces.protocol.outcome import Outcome, ProbeRequest
from search_spaces.protocol.worker_messages import OutcomeReport
from tests.kit.fake_service import TOKEN
from tests.kit.worker_loop import FAILED, IDENTITY, WorkedService, make_request, run_until_cancelled
from workers.errors import RanksLeftError, ServiceUnreachableError, WorkerReplacedError
from workers.launchers.base import Cancelled, OnEvent
from workers.launchers.group_launcher import GroupLauncher
from workers.service.lease_client import EncodedOutcome, LeaseClient
from workers.worker.outcome_spool import Spool


def test_a_trial_is_run_and_its_outcome_posted_once(service: WorkedService) -> None:
    service.add(7)
    launcher = service.work(until=lambda: service.outcomes)
    assert launcher.requests == [ProbeRequest.from_mapping(make_request())]
    (posted,) = service.outcomes
    assert (posted["trial_id"], posted["attempt"]) == (7, 1)
    assert posted["worker_id"] == "session-1"
    assert posted["outcome"] == FAILED.to_mapping()
    assert service.unregistered == ["session-1"]
    assert launcher.closed
    assert not service.kept()


def test_heartbeats_tell_a_trials_progress_until_it_is_stopped(service: WorkedService) -> None:
    def stop_once_it_is_told() -> bool:
        if any(beat["iterations_done"] == 5 for beat in service.beats().values()):
            service.stop = [7]
        return bool(service.outcomes)

    service.add(7)
    service.work(run_until_cancelled, until=stop_once_it_is_told)
    assert service.posted()[7]["state"] == "cancelled"


def test_a_worker_whose_nodes_do_not_come_up_ends_at_once(service: WorkedService) -> None:
    begun = threading.Event()

    def wait_for_nodes() -> GroupLauncher:
        begun.set()
        # Short sleeps: a signal between Python's check and the call does not end the call.
        for _ in range(600):
            time.sleep(0.1)
        raise AssertionError("nobody has asked it to end")

    service.work(until=begun.is_set, start_launcher=wait_for_nodes)
    assert service.unregistered == ["session-1"]


def test_the_next_worker_posts_outcomes_of_a_killed_one(service: WorkedService) -> None:
    with Spool(service.spool_dir) as spool:
        for trial_id, attempt in ((4, 1), (5, 2)):
            report = OutcomeReport(
                trial_id=trial_id, attempt=attempt, worker_id="session-0", outcome=FAILED
            )
            spool.keep(EncodedOutcome.of(report))
    service.refuses = lambda body: bool(body["attempt"] == 1)
    service.work(until=lambda: service.outcomes)
    (posted,) = service.outcomes
    assert (posted["trial_id"], posted["attempt"], posted["worker_id"]) == (5, 2, "session-0")
    assert not service.kept()
    assert (service.spool_dir / "rejected" / "trial-4-attempt-1.json").exists()


@pytest.mark.parametrize("trials", [(7,), ()], ids=["while it probes", "while it waits"])
def test_a_worker_whose_name_is_taken_ends(service: WorkedService, trials: tuple[int, ...]) -> None:
    def be_superseded() -> bool:
        is_told = bool(service.heartbeats) and set(service.beats()) == set(trials)
        if is_told and len(service.registrations) == 1:
            with LeaseClient(service.url, TOKEN) as other:
                other.register(IDENTITY)
        return False

    service.add(*trials)
    with pytest.raises(WorkerReplacedError, match="another worker has registered as w; give"):
        service.work(run_until_cancelled, until=be_superseded)
    assert len(service.registrations) == 2
    assert service.outcomes == []
    assert service.live_worker == "session-2"


def test_a_heartbeat_that_hangs_gives_way_to_the_next(service: WorkedService) -> None:
    service.stalls = True
    service.work(until=lambda: len(service.heartbeats) > 1)
    assert service.answered_heartbeats == 0, "the second one came while the first had no answer"
    service.stalls = False


def test_a_node_that_cannot_be_cleaned_takes_no_other_trial(service: WorkedService) -> None:
    def leave_a_process(_on_event: OnEvent, _cancelled: Cancelled) -> Outcome:
        raise RanksLeftError("processes [1] are still there")

    service.add(7, 8)
    launcher = service.work(
        leave_a_process,
        until=lambda: service.outcomes and service.states().get("n0") == "quarantined",
    )
    (outcome,) = service.posted().values()
    assert (outcome["reason"], outcome["node"]) == ("node_lost", "n0")
    assert len(launcher.requests) == 1
    assert service.unregistered == ["session-1"]


def test_an_absent_service_ends_the_worker_when_patience_runs_out(service: WorkedService) -> None:
    service.away = True
    with pytest.raises(ServiceUnreachableError, match="503"):
        service.work(until=lambda: False, patience_s=0.3)


def test_a_worker_that_is_interrupted_while_it_asks_for_its_role_unregisters(
    service: WorkedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_client: LeaseClient) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(LeaseClient, "role", interrupted)
    with pytest.raises(KeyboardInterrupt):
        service.work(until=lambda: service.unregistered)
    assert service.unregistered == ["session-1"]

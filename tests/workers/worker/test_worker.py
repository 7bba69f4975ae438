"""The worker's loop with a real HTTP service and a launcher that obeys; and whatever fails it."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from layout_tuner.protocol.outcome import Outcome, ProbeRequest
from layout_tuner.protocol.worker_messages import (
    HeartbeatBody,
    HeartbeatReply,
    LeaseRead,
    OutcomeReport,
)
from layout_tuner.timing_mark import SHARED_CORES_VARIABLE, TIMING_VARIABLE, timing
from layout_tuner.workers.errors import RanksLeftError, ServiceUnreachableError, WorkerReplacedError
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.launchers.launcher_nodes import Cancelled, OnEvent
from layout_tuner.workers.packing.request import Share
from layout_tuner.workers.service.lease_client import EncodedOutcome, LeaseClient
from layout_tuner.workers.worker.events import WorkerBroken, WorkerEvent
from layout_tuner.workers.worker.heartbeat import Heartbeat, News
from layout_tuner.workers.worker.held_trial import HeldTrial
from layout_tuner.workers.worker.node_health import HealthReport
from layout_tuner.workers.worker.outcome_spool import Spool
from layout_tuner.workers.worker.roster import RosterNode
from tests.kit.fake_launcher import FakeLauncher
from tests.kit.fake_service import TOKEN
from tests.kit.waiting import wait_until
from tests.kit.worker_loop import (
    DONE,
    FAILED,
    IDENTITY,
    WorkedService,
    ends_when,
    launcher_of,
    make_request,
    run_until_cancelled,
)


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


def test_probes_go_on_while_the_service_is_away(service: WorkedService) -> None:
    service.add(1, 2, 3, num_devices=1)

    def run(_on_event: OnEvent, _cancelled: Cancelled) -> Outcome:
        # Two are on the two devices, the third is leased ahead and starts without the service.
        wait_until("all are leased", lambda: len(service.beats()) == 3 or service.away, 20)
        service.away = True
        return DONE

    def watch() -> bool:
        if len(service.kept()) == 3:
            service.away = False
        return len(service.outcomes) == 3

    service.share(FakeLauncher(run), until=watch)
    assert set(service.posted()) == {1, 2, 3}
    assert len(service.registrations) == 1


def test_a_request_that_a_proxy_answered_is_sent_again(service: WorkedService) -> None:
    """A proxy answers everything with a page of its own for a while: leases, beats and outcomes."""
    pages: list[str] = []
    most = 6

    def answer_with_a_page(path: list[str], _body: Any) -> tuple[int, str] | None:
        if path == ["v1", "workers"] or len(pages) >= most:
            return None
        pages.append(path[-1])
        return 200, "<html>maintenance</html>"

    def watch() -> bool:
        nonlocal most
        if set(service.posted()) == {1}:
            most = 12  # once more, now that an outcome is on its way
        return len(service.outcomes) == 2

    service.add(1, 2)
    service.intercept(answer_with_a_page)
    service.work(launcher_of(2), until=watch)
    assert set(service.posted()) == {1, 2}
    assert not list(service.spool_dir.glob("rejected/*")), "a page refuses nothing"


def test_a_status_that_the_service_does_not_take_costs_no_lease(service: WorkedService) -> None:
    def refuse_every_status(path: list[str], body: Any) -> tuple[int, Any] | None:
        is_status = path[-1] == "heartbeats" and body["status"] is not None
        return (422, {"detail": "the status is refused"}) if is_status else None

    service.add(1)
    service.intercept(refuse_every_status)
    service.work(launcher_of(2, ends=lambda: False), until=lambda: 1 in service.beats())


def test_a_trial_that_is_leased_again_ends_its_older_attempt(service: WorkedService) -> None:
    """The network was cut until the lease ran out: the service leases the trial once more, here."""
    service.add(1, num_devices=1)
    runs: list[int] = []
    go = threading.Event()

    def run(request: ProbeRequest, *rest: Any) -> Outcome:
        runs.append(1)
        return ends_when(go.is_set if len(runs) > 1 else lambda: False)(request, *rest)

    def watch() -> bool:
        if len(runs) == 1 and not service.trials and service.heartbeats:
            service.add_trial(1, launcher.requests[0].to_mapping(), attempt=2)
        if len(runs) == 2 and len(launcher.running) == 1:
            go.set()
        return bool(service.outcomes)

    launcher = FakeLauncher(placed=run)
    service.share(launcher, until=watch)
    (body,) = service.outcomes
    assert body["attempt"] == 2, "the older one has nothing to say"


def test_a_stopped_older_attempt_does_not_stop_the_one_that_waits_for_its_devices(
    service: WorkedService,
) -> None:
    """A heartbeat between the new lease and the end of the older attempt; cancels name trials."""
    service.add(1)
    ends_first, has_new = threading.Event(), threading.Event()
    answered: list[list[int]] = []

    def run(_on_event: OnEvent, _cancelled: Cancelled) -> Outcome:
        if len(launcher.requests) == 1:
            ends_first.wait(30)  # its ranks take a while to end
            return Outcome(state="cancelled", reason="cancelled", message="cancelled")
        return FAILED

    def stop_older_attempts(path: list[str], body: Any) -> tuple[int, Any] | None:
        if path[-1] != "heartbeats" or not has_new.is_set():
            return None
        older = [beat["trial_id"] for beat in body["trials"] if beat["attempt"] != 2]
        answered.append([beat["attempt"] for beat in body["trials"]])
        return 200, {"stop": older, "release": [], "quarantine": []}

    def watch() -> bool:
        if launcher.requests and not has_new.is_set():
            service.add_trial(1, launcher.requests[0].to_mapping(), attempt=2)
            has_new.set()
        if sum(2 in attempts for attempts in answered) > 1:
            ends_first.set()  # an answer to the first has been taken
        return bool(service.outcomes)

    launcher = FakeLauncher(run)
    service.intercept(stop_older_attempts)
    try:
        service.work(launcher, until=watch)
    finally:
        ends_first.set()
    (body,) = service.outcomes
    assert body["attempt"] == 2
    assert body["outcome"]["reason"] == FAILED.reason, "it ran, and was not stopped"


def test_a_probe_that_hangs_does_not_keep_the_worker_for_ever(
    service: WorkedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layout_tuner.workers.worker.scheduler._DRAIN_WITHIN_S", 0.3)
    end = threading.Event()

    def hang(_on_event: OnEvent, _cancelled: Cancelled) -> Outcome:
        end.wait(30)
        return FAILED

    service.add(1)
    launcher = FakeLauncher(hang)
    try:
        service.work(launcher, until=lambda: launcher.running)
        assert service.unregistered == ["session-1"]
        assert service.outcomes == []
    finally:
        end.set()


def test_an_outcome_that_waited_is_posted_before_trials_are_leased(service: WorkedService) -> None:
    """Its own trial might be: the lease ran out while the service was away."""
    told: list[str] = []

    def note(path: list[str], _body: Any) -> None:
        if not service.away and path[-1] in ("leases", "outcome"):
            told.append(path[-1])

    def go_away(_on_event: OnEvent, _cancelled: Cancelled) -> Outcome:
        service.away = True
        threading.Timer(3.0, come_back).start()
        return FAILED

    def come_back() -> None:
        told.clear()
        service.add(2)
        service.away = False

    service.intercept(note)
    service.add(1)
    service.work(go_away, until=lambda: "leases" in told and service.posted())
    assert told[0] == "outcome"


def make_trial() -> HeldTrial:
    lease = LeaseRead(
        trial_id=1,
        attempt=1,
        campaign="c",
        number=1,
        request=make_request(),
        lease_expires_at=datetime(2026, 1, 1, tzinfo=UTC),
    )
    request = ProbeRequest.from_mapping(lease.request)
    return HeldTrial(lease=lease, worker_id="w", request=request)


def test_a_trial_may_start_on_a_node_that_the_news_does_not_have_yet() -> None:
    trial = make_trial()
    news = News(worker_id="w", trials=(trial,), nodes=(RosterNode(name="n0", num_devices=2),))
    trial.begin((Share.of_first(1, 2),), whole=True, nodes_held=1.0)
    (node,) = news.status().nodes
    assert (node.name, node.doing, node.free_devices) == ("n0", "", 2)


def test_a_heartbeat_that_breaks_down_ends_the_worker_and_not_its_leases_in_silence() -> None:
    class Client:
        def heartbeat(self, *_: Any, **__: Any) -> None:
            raise ZeroDivisionError("a bug")

    events: SimpleQueue[WorkerEvent] = SimpleQueue()
    heartbeat = Heartbeat(Client(), interval_s=0.01, news=News(worker_id="w"), events=events)
    event = events.get(timeout=30)
    heartbeat.end()
    assert isinstance(event, WorkerBroken)
    assert isinstance(event.error, ZeroDivisionError)


def test_a_health_report_is_told_once_a_session_and_when_there_is_another() -> None:
    told: list[tuple[str, Any]] = []

    class Client:
        def heartbeat(self, worker_id: str, said: HeartbeatBody, **_: Any) -> HeartbeatReply:
            (node,) = said.status.nodes
            told.append((worker_id, node.health and node.health["num_devices_seen"]))
            return HeartbeatReply(stop=())

    def news(worker_id: str, report: HealthReport) -> News:
        node = RosterNode(name="n0", num_devices=2, report=report)
        return News(worker_id=worker_id, nodes=(node,))

    first, second = (HealthReport(device="cpu", num_devices=2, num_devices_seen=n) for n in (1, 2))
    heartbeat = Heartbeat(Client(), interval_s=0.005, news=news("a", first), events=SimpleQueue())
    for said in (news("a", first), news("a", second), news("b", second)):
        heartbeat.news = said
        number = len(told) + 4
        wait_until("some beats were sent", lambda number=number: len(told) >= number)
    heartbeat.end()
    assert [one for one in told if one[1] is not None] == [("a", 1), ("a", 2), ("b", 2)]


def test_an_idle_worker_leaves_out_every_second_heartbeat_until_something_changes() -> None:
    told: list[str] = []
    orders = HeartbeatReply(stop=(), release=("n0",))
    answers = iter([HeartbeatReply(stop=()), orders])

    class Client:
        def heartbeat(self, _worker_id: str, said: HeartbeatBody, **_: Any) -> HeartbeatReply:
            told.append(said.status.state)
            return next(answers, HeartbeatReply(stop=()))

    idle = News(worker_id="w", state="working", nodes=(RosterNode(name="n0", num_devices=2),))
    heartbeat = Heartbeat(Client(), interval_s=3600.0, news=idle, events=SimpleQueue())
    draining = replace(idle, state="draining")
    busy = replace(draining, trials=(make_trial(),))
    told_after = []
    for news in (idle, idle, idle, idle, idle, idle, draining, draining, busy, busy, busy):
        if not heartbeat._leaves_out(news):
            heartbeat._beat("w", news)
        told_after.append(len(told))
    heartbeat.end()
    # The third is sent; its answer has orders, so that the next one is sent too.
    assert told_after == [1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 8]


def test_two_of_three_heartbeats_are_left_out_while_ranks_time_but_none_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TIMING_VARIABLE, str(tmp_path / "timing"))
    is_away = False

    class Client:
        def heartbeat(self, *_: Any, **__: Any) -> HeartbeatReply:
            if is_away:
                raise ServiceUnreachableError("away")
            return HeartbeatReply(stop=())

    busy = News(worker_id="w", trials=(make_trial(),))
    heartbeat = Heartbeat(Client(), interval_s=3600.0, news=busy, events=SimpleQueue())

    def is_sent() -> bool:
        if heartbeat._leaves_out(busy):
            return False
        return heartbeat._beat("w", busy)

    with timing():
        assert [is_sent() for _ in range(7)] == [True, False, False, True, False, False, True]
        is_away = True
        assert [is_sent() for _ in range(5)] == [False, False, True, True, True]
    is_away = False
    assert [is_sent() for _ in range(3)] == [True] * 3, "nobody times"
    monkeypatch.delenv(SHARED_CORES_VARIABLE)
    with timing():
        assert [is_sent() for _ in range(3)] == [True] * 3, "the service is elsewhere"
    heartbeat.end()

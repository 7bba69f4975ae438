"""Heartbeats go on whatever the trials do meanwhile, or the worker ends and says why."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import Any

from search_spaces.protocol.outcome import ProbeRequest
from search_spaces.protocol.worker_messages import HeartbeatBody, HeartbeatReply, LeaseRead
from tests.kit.waiting import wait_until
from tests.kit.worker_loop import make_request
from workers.packing.request import Share
from workers.worker.events import WorkerBroken, WorkerEvent
from workers.worker.heartbeat import Heartbeat, News
from workers.worker.held_trial import HeldTrial
from workers.worker.node_health import HealthReport
from workers.worker.roster import RosterNode


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
        if not heartbeat._is_as_before(news):
            heartbeat._beat("w", news)
        else:
            heartbeat._idle_since = None
        told_after.append(len(told))
    heartbeat.end()
    # The third is sent; its answer has orders, so that the next one is sent too.
    assert told_after == [1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 8]

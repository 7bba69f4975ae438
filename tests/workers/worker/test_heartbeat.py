"""Heartbeats go on whatever the trials do meanwhile, or the worker ends and says why."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any, cast

from search_spaces.outcome import ProbeRequest
from tests.workers.process_checks import wait_until
from tests.workers.test_worker import REQUEST
from workers.health import HealthReport
from workers.heartbeat import Heartbeat
from workers.held_trial import HeldTrial
from workers.lease_client import LeaseClient
from workers.node_roster import NodeRecord
from workers.packing.shares import Share
from workers.protocol import HeartbeatAnswer, Lease
from workers.worker_events import WorkerBroken, WorkerEvent
from workers.worker_status import News


def make_trial() -> HeldTrial:
    lease = Lease(trial_id=1, attempt=1, campaign="c", number=1, request=REQUEST)
    return HeldTrial(lease=lease, worker_id="w", request=ProbeRequest.from_mapping(REQUEST))


def test_a_trial_may_start_on_a_node_that_the_news_does_not_have_yet() -> None:
    trial = make_trial()
    news = News(worker_id="w", trials=(trial,), nodes=(NodeRecord(name="n0", num_devices=2),))
    trial.begin((Share.of_first(1, 2),), whole=True, nodes_held=1.0)
    (node,) = news.status().nodes
    assert (node.name, node.doing, node.free_devices) == ("n0", "", 2)


def test_a_heartbeat_that_breaks_down_ends_the_worker_and_not_its_leases_in_silence() -> None:
    class Client:
        def heartbeat(self, *_: Any, **__: Any) -> None:
            raise ZeroDivisionError("a bug")

    events: SimpleQueue[WorkerEvent] = SimpleQueue()
    client = cast("LeaseClient", Client())
    heartbeat = Heartbeat(client, interval_s=0.01, news=News(worker_id="w"), events=events)
    event = events.get(timeout=30)
    heartbeat.end()
    assert isinstance(event, WorkerBroken)
    assert isinstance(event.error, ZeroDivisionError)


def test_a_health_report_is_told_once_a_session_and_when_there_is_another() -> None:
    told: list[tuple[str, Any]] = []

    class Client:
        def heartbeat(self, worker_id: str, _b: Any, status: Any, **_: Any) -> HeartbeatAnswer:
            (node,) = status.nodes
            told.append((worker_id, node.health and node.health["num_devices_seen"]))
            return HeartbeatAnswer(stop=())

    def news(worker_id: str, report: HealthReport) -> News:
        node = NodeRecord(name="n0", num_devices=2, report=report)
        return News(worker_id=worker_id, nodes=(node,))

    first, second = (HealthReport(device="cpu", num_devices=2, num_devices_seen=n) for n in (1, 2))
    heartbeat = Heartbeat(
        cast("LeaseClient", Client()), interval_s=0.005, news=news("a", first), events=SimpleQueue()
    )
    for said in (news("a", first), news("a", second), news("b", second)):
        heartbeat.news = said
        number = len(told) + 4
        wait_until("some beats were sent", lambda number=number: len(told) >= number)
    heartbeat.end()
    assert [one for one in told if one[1] is not None] == [("a", 1), ("a", 2), ("b", 2)]

"""Heartbeats go on whatever the trials do meanwhile, or the worker ends and says why."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any, cast

from search_spaces.outcome import ProbeRequest
from tests.workers.test_worker import REQUEST
from workers.heartbeat import Heartbeat
from workers.held_trial import HeldTrial
from workers.lease_client import LeaseClient
from workers.node_roster import NodeRecord
from workers.packing.shares import Share
from workers.protocol import Lease
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

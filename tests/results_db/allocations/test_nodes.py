"""Nodes of allocations: quarantines and releases, also of two services at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from benchmarks.service.postgres_server import PostgresServer
from results_db.allocations.node_status import RELEASE_TIME_S, note_quarantines
from results_db.errors import NodeNotFoundError, NodeStateError, WorkerSupersededError
from results_db.models.service_tables import WorkerRow
from results_db.records import WorkerRecord
from results_db.store import Store
from search_spaces.protocol.states import NodeState
from search_spaces.protocol.worker_messages import (
    HeartbeatReply,
    NodeBody,
    NodeStatusBody,
    SetAside,
    StatusBody,
    WorkerCreate,
)
from tests.kit.postgres import is_anybody_waiting
from tests.kit.store import TurnableClock, make_worker, send_beats
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.sqlite_is_enough

CLUSTER = "local-cpu"


def make_allocation(store: Store, name: str = "w1") -> WorkerRecord:
    return store.workers.register(
        WorkerCreate(
            name=name,
            host="login",
            cluster=CLUSTER,
            num_nodes=1,
            devices_per_node=8,
            device="GCD",
            versions={},
            nodes=[NodeBody(name="n1", num_devices=8)],
        )
    )


def show(
    store: Store, worker_id: str, state: NodeState, reason: str = "", *others: NodeStatusBody
) -> HeartbeatReply:
    node = NodeStatusBody(name="n1", state=state, reason=reason)
    return send_beats(store, worker_id, [], status=StatusBody(nodes=[node, *others]))


def quarantined(store: Store) -> list[str]:
    return [aside.reason for aside in store.workers.quarantined_nodes(CLUSTER)]


def test_a_release_is_told_until_the_worker_has_done_it(store: Store, clock: TurnableClock) -> None:
    worker = make_allocation(store)
    with pytest.raises(NodeStateError, match="n1 of cluster local-cpu is not in quarantine"):
        store.allocations.release_node(CLUSTER, "n1")
    assert show(store, worker.id, "quarantined", "slow") == HeartbeatReply(stop=())
    assert quarantined(store) == ["slow"]
    store.allocations.release_node(CLUSTER, "n1")
    assert quarantined(store) == []
    clock.forward(3600)  # the worker was away; nothing was told meanwhile
    for _ in range(3):
        clock.forward(2)
        assert show(store, worker.id, "quarantined", "slow").release == ("n1",)
    assert show(store, worker.id, "checking").release == ()
    assert quarantined(store) == []


@pytest.mark.parametrize("how", ["shown idle first", "failed its check at once", "by a new worker"])
def test_a_released_node_is_set_aside_again(store: Store, clock: TurnableClock, how: str) -> None:
    worker = make_allocation(store)
    show(store, worker.id, "quarantined", "slow")
    store.allocations.release_node(CLUSTER, "n1")
    if how == "shown idle first":
        show(store, worker.id, "idle")
    elif how == "failed its check at once":
        assert show(store, worker.id, "quarantined", "slow").release == ("n1",)
        clock.forward(RELEASE_TIME_S + 1)
    else:
        clock.forward(1)
        worker = make_allocation(store)
    assert show(store, worker.id, "quarantined", "slow again") == HeartbeatReply(stop=())
    assert quarantined(store) == ["slow again"]


def test_every_worker_that_has_the_node_hears_of_a_quarantine(store: Store) -> None:
    first, second = make_allocation(store), make_allocation(store, "w2")
    show(store, first.id, "quarantined", "slow")
    assert show(store, second.id, "idle").quarantine == (SetAside(node="n1", reason="slow"),)
    store.allocations.release_node(CLUSTER, "n1")
    assert show(store, first.id, "idle") == HeartbeatReply(stop=())
    for cluster, node in ((CLUSTER, "n7"), ("elsewhere", "n1")):
        with pytest.raises(NodeNotFoundError, match=f"no allocation of cluster '{cluster}'"):
            store.allocations.release_node(cluster, node)
        with pytest.raises(NodeNotFoundError):
            store.allocations.quarantine_node(cluster, node, "loud")


def test_the_last_reason_of_a_quarantine_stands(store: Store, clock: TurnableClock) -> None:
    worker = make_allocation(store)
    show(store, worker.id, "busy")
    first = store.allocations.quarantine_node(CLUSTER, "n1", "loud")
    clock.forward(5)
    again = store.allocations.quarantine_node(CLUSTER, "n1", "very loud")
    assert first.quarantine is not None
    assert again.quarantine is not None
    assert again.quarantine.since == first.quarantine.since
    assert again.quarantine.reason == "very loud"
    # A heartbeat without a status leaves the last one, and is still told of wishes.
    answer = send_beats(store, worker.id, [])
    assert answer.quarantine == (SetAside(node="n1", reason="very loud"),)
    assert [node.state for node in store.allocations.get(worker.id).nodes] == ["busy"]


def test_a_status_of_a_session_that_has_ended_changes_nothing(store: Store) -> None:
    stale = make_allocation(store)
    now = make_allocation(store)
    with pytest.raises(WorkerSupersededError):
        show(store, stale.id, "quarantined", "slow")
    assert quarantined(store) == []
    (node,) = store.allocations.get(now.id).nodes
    assert node.state == "starting"


def test_nodes_that_join_late_make_room_and_nodes_that_leave_are_forgotten(store: Store) -> None:
    worker = make_allocation(store)
    show(store, worker.id, "busy", "", NodeStatusBody(name="n2", state="idle"))
    allocation = store.allocations.get(worker.id)
    assert [(n.name, n.num_devices) for n in allocation.nodes] == [("n1", 8), ("n2", 8)]
    assert allocation.worker.num_nodes == 2
    show(store, worker.id, "busy")
    assert [n.name for n in store.allocations.get(worker.id).nodes] == ["n1"]


def test_a_thousand_nodes_are_kept_in_the_worker_s_order(store: Store) -> None:
    worker = make_worker(store, num_nodes=1000)
    nodes = [NodeStatusBody(name=f"n{number}", state="idle") for number in range(1000)]
    for state in ("idle", "busy"):
        nodes[500] = NodeStatusBody(name="n500", state=state)  # type: ignore[arg-type]
        send_beats(store, worker.id, [], status=StatusBody(nodes=nodes))
    kept = store.allocations.get(worker.id).nodes
    assert [node.name for node in kept] == [node.name for node in nodes]
    assert kept[500].state == "busy"
    assert store.allocations.get(worker.id).worker.num_nodes == 1000


def say(store: Store, worker_id: str, reason: str) -> None:
    show(store, worker_id, "quarantined", reason)


def set_aside(store: Store, _worker_id: str, reason: str) -> None:
    store.allocations.quarantine_node(CLUSTER, "n1", reason)


@pytest.mark.parametrize(("do", "stands"), [(say, "slow"), (set_aside, "loud")])
def test_a_quarantine_that_another_service_is_just_writing_is_waited_for(
    postgres_server: PostgresServer,
    postgres_url: str,
    do: Callable[[Store, str, str], None],
    stands: str,
) -> None:
    # On PostgreSQL alone: SQLite has one writer at a time.
    with closing(Store(postgres_url)) as here, closing(Store(postgres_url)) as there:
        first, second = make_allocation(here).id, make_allocation(there, "w2").id
        slow = NodeStatusBody(name="n1", state="quarantined", reason="slow")
        with ThreadPoolExecutor(1) as pool:
            with here._db.write() as session:
                row = session.get_one(WorkerRow, first)
                note_quarantines(session, row, [slow], here.now())
                done = pool.submit(do, there, second, "loud")
                wait_until(
                    "the other one waits", lambda: is_anybody_waiting(postgres_server, postgres_url)
                )
            done.result(30)
        assert quarantined(here) == [stands]

"""Two services receive a node's first quarantine at the same moment: neither of them fails.

On PostgreSQL alone: SQLite has one writer at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from benchmarks.service.postgres_server import PostgresServer
from results_db.allocations.node_status import note_quarantines
from results_db.models.service_tables import WorkerRow
from results_db.records import WorkerRecord
from results_db.store import Store
from search_spaces.protocol.worker_messages import NodeStatusBody, StatusBody
from tests.kit.postgres import is_anybody_waiting
from tests.kit.store import make_worker, send_beats
from tests.kit.waiting import wait_until

CLUSTER = "local-cpu"


def node(reason: str) -> NodeStatusBody:
    return NodeStatusBody(name="n0", state="quarantined" if reason else "idle", reason=reason)


def show(store: Store, worker: WorkerRecord, status: NodeStatusBody) -> None:
    send_beats(store, worker.id, [], status=StatusBody(nodes=[status]))


def set_aside(store: Store, _worker: WorkerRecord, status: NodeStatusBody) -> None:
    store.allocations.quarantine_node(CLUSTER, status.name, status.reason)


@pytest.mark.parametrize(("do", "stands"), [(show, "slow"), (set_aside, "loud")])
def test_a_quarantine_that_another_service_is_just_writing_is_waited_for(
    postgres_server: PostgresServer,
    postgres_url: str,
    do: Callable[[Store, WorkerRecord, NodeStatusBody], None],
    stands: str,
) -> None:
    with closing(Store(postgres_url)) as here, closing(Store(postgres_url)) as there:
        first, second = make_worker(here), make_worker(there, "w2")
        for worker in (first, second):
            show(here, worker, node(""))
        with ThreadPoolExecutor(1) as pool:
            with here._db.write() as session:
                row = session.get_one(WorkerRow, first.id)
                note_quarantines(session, row, [node("slow")], here.now())
                done = pool.submit(do, there, second, node("loud"))
                wait_until(
                    "the other one waits", lambda: is_anybody_waiting(postgres_server, postgres_url)
                )
            done.result(30)
        assert [aside.reason for aside in here.workers.quarantined_nodes(CLUSTER)] == [stands]

"""Allocations over HTTP: what workers say of them, why trials wait there, and what they cost."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import update

from layout_tuner.client.clients import Client
from layout_tuner.client.errors import ServiceError
from layout_tuner.results_db.models.service_tables import WorkerRow
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.allocation import ALLOCATION, LAYOUT, NODES, Place, beat, node, register
from tests.kit.api import Api
from tests.kit.store import completed

SLOW = node("n2", "quarantined", reason="slow")
DRAINS = "the allocation drains: it takes no more trials"
AWAY = node("n2", "recovering", reason="its agent has ended; start Ray on n2 again")
LOST = (
    "it needs 2 nodes, and 1 of the 2 here are lost or in quarantine "
    "(n2: its agent has ended; start Ray on n2 again)"
)
CHECKED = "it needs 2 nodes, and 1 of the 2 here are lost, being checked or in quarantine"
SET_ASIDE = (
    "it needs 2 nodes, and 1 of the 2 here are lost or in quarantine (n2: slow); "
    "`layout-tuner allocation release` ends that"
)


def change_workers(api: Api, **values: Any) -> None:
    with api.store._db.write() as session:
        session.execute(update(WorkerRow).values(**values))


def test_an_allocation_is_listed_with_what_its_worker_said_when_it_registered(api: Api) -> None:
    worker = register(api)
    (read,) = api.get("/allocations", name=worker)["allocations"]
    assert read["id"] == worker
    said = [read[name] for name in ("cluster", "scheduler", "job_id", "launcher")]
    assert said == ["local-cpu", "slurm", "4711", "srun"]
    assert 3500 < read["seconds_left"] <= 3600
    assert (read["shares_nodes"], read["state"], read["status_at"]) == (True, "working", None)
    assert {n["name"]: n["state"] for n in read["nodes"]} == {"n1": "starting", "n2": "starting"}


def test_an_allocation_has_what_the_last_heartbeat_of_its_worker_said_of_its_nodes(
    api: Api,
) -> None:
    worker = register(api)
    busy = node("n1", "busy", doing="trial 3 of first", free_devices=2, health={"gemm": [1.5, 2.5]})
    beat(api, worker, busy, node("n2", "lost", reason="no answer"), status={"ends_in_s": 60.0})
    read = api.get(f"/allocations/{worker}")
    assert read["nodes"][0] == {**busy, "num_devices": 4, "reason": ""}
    assert (read["nodes"][1]["state"], read["nodes"][1]["reason"]) == ("lost", "no answer")
    assert 0 < read["seconds_left"] <= 60


def test_an_allocation_is_listed_after_its_end_only_if_asked(api: Api) -> None:
    worker = register(api)
    api.http.delete(f"/v1/workers/{worker}")
    assert api.get("/allocations", name=worker)["allocations"] == []
    (read,) = api.get("/allocations", name=worker, all=True)["allocations"]
    assert (read["id"], read["state"], read["not_leased"]) == (worker, "ended", [])


def test_allocations_are_found_by_worker_job_or_session_however_many_came_after(api: Api) -> None:
    first = register(api, "found", allocation=ALLOCATION | {"job_id": "1"})
    api.http.delete(f"/v1/workers/{first}")
    others = [
        register(api, f"w{n}", allocation=ALLOCATION | {"job_id": str(n)}) for n in range(2, 5)
    ]
    for name in (first, "found", "1"):
        (found,) = api.get("/allocations", all=True, limit=1, name=name)["allocations"]
        assert found["id"] == first
    assert api.get("/allocations", name="1")["allocations"] == []
    (found,) = api.get("/allocations", name="3")["allocations"]
    assert found["id"] == others[1]


def test_leased_trials_show_their_phase_and_a_campaign_whose_trials_all_wait_says_why(
    api: Api,
) -> None:
    here = Place(api, "phases")
    worker = here.register()
    ids = [here.add(), here.add(Layout(tp=2, num_microbatches=8))]
    leases = [api.lease(worker) for _ in ids]
    trials = [{"trial_id": trial, "attempt": 1, "iterations_done": 0} for trial in ids]
    because = "2 devices are free, it needs 4"
    waits = {"phase": "waiting", "held_s": 0.0, "waiting_because": because}
    beat(api, worker, trials=[{**trial, **waits} for trial in trials])
    assert here.why_it_waits() == because
    trials[0] |= {"phase": "iterating", "iterations_done": 3, "held_s": 1e-3, "nodes_held": 0.25}
    beat(api, worker, trials=[trials[0], trials[1] | waits])
    assert here.why_it_waits() is None
    read = api.get(f"/allocations/{worker}")
    (running,), (waiting,) = read["running"], read["waiting"]
    assert (running["number"], running["phase"], running["held_s"]) == (1, "iterating", 1e-3)
    assert (running["nodes_held"], running["iterations_done"]) == (0.25, 3)
    assert (waiting["number"], waiting["waiting_because"]) == (2, because)
    assert api.get(f"/trials/{ids[1]}")["attempts"][0]["waiting_because"] == because
    api.report(worker, leases[0], completed(LAYOUT))
    assert here.why_it_waits() is None, "an outcome has just come"


@pytest.mark.parametrize(
    ("name", "layout", "nodes", "status", "why"),
    [
        ("devices", Layout(dp=8), (), {}, "it needs 8 devices on 1 node, and a node here has 4"),
        ("nodes", Layout(num_nodes=3, dp=3), (), {}, "it needs 3 nodes, and there are 2 here"),
        ("quarantine", Layout(num_nodes=2, dp=2), (node("n1"), SLOW), {}, SET_ASIDE),
        ("recovering", Layout(num_nodes=2, dp=2), (node("n1"), AWAY), {}, LOST),
        ("checked", Layout(num_nodes=2, dp=2), (node("n1"), node("n2", "checking")), {}, CHECKED),
        ("time", Layout(), (), {"ends_in_s": 100.0}, "its probe may take 300 s, and "),
        ("draining", Layout(), (), {"state": "draining"}, DRAINS),
    ],
)
def test_a_trial_that_an_allocation_will_not_lease_says_why(
    api: Api, name: str, layout: Layout, nodes: Any, status: Any, why: str
) -> None:
    here = Place(api, name)
    worker = here.register()
    beat(api, worker, *nodes, status=status)
    here.add(layout)
    read = api.get(f"/allocations/{worker}")
    assert read["num_not_leased"] == 1
    assert read["not_leased"][0]["reason"].startswith(why)
    assert (read["not_leased"][0]["campaign"], read["not_leased"][0]["number"]) == (here.name, 1)
    if status or nodes:
        waits = here.why_it_waits()
        assert waits.startswith(f"trial 1 waits: no allocation may run it; w1: {why}")


def test_a_trial_that_fits_says_what_it_waits_for(api: Api) -> None:
    here = Place(api, "fits")
    worker = here.register()
    here.add()

    def why() -> str:
        (waiting,) = api.get(f"/allocations/{worker}")["not_leased"]
        return str(waiting["reason"])

    assert why().startswith("it fits, and waits until devices are free")
    assert here.why_it_waits() is None
    elsewhere = register(api, "w2", cluster="frontier")
    assert api.get(f"/allocations/{elsewhere}")["num_not_leased"] == 0
    beat(api, worker, status={"state": "starting"})
    assert why() == "the allocation's nodes are not ready yet"
    assert here.why_it_waits().endswith("w1: the allocation's nodes are not ready yet")
    change_workers(api, seen_at=datetime(2026, 1, 1, tzinfo=UTC))
    assert api.get(f"/allocations/{worker}")["state"] == "silent"
    assert why() == "worker w1 was not heard of lately"
    worker = here.register()
    api.post("/campaigns/fits/pause")
    assert why() == "its campaign is paused"


def test_the_most_suitable_allocation_says_why_a_trial_waits(api: Api) -> None:
    here = Place(api, "two")
    here.add(Layout(num_nodes=2, dp=8))
    here.register("small", num_nodes=1, nodes=NODES[:1])
    large = here.register("large")
    beat(api, large, status={"ends_in_s": 100.0})
    waits = here.why_it_waits()
    assert waits.startswith("trial 1 waits: no allocation may run it; large: its probe may take")
    beat(api, large, status={"ends_in_s": 1000.0})
    assert here.why_it_waits() is None


def test_the_client_reads_allocations_and_quarantines_nodes(api: Api, client: Client) -> None:
    worker = register(api, cluster="of-client")
    one = client.allocation(worker)
    (listed,) = (each for each in client.allocations().allocations if each.id == worker)
    assert (listed.nodes, listed.cost) == (one.nodes, one.cost)
    assert client.allocations(ended=True, limit=1).allocations[0].id == worker
    assert client.quarantine_node("of-client", "n1", "loud").quarantine is not None
    assert [n.name for n in client.nodes("of-client").nodes] == ["n1", "n2"]
    released = client.release_node("of-client", "n1").quarantine
    assert released.released_at is not None
    with pytest.raises(ServiceError, match="is not in quarantine"):
        client.release_node("of-client", "n1")
    gone = register(api, "gone", cluster="of-client")
    api.http.delete(f"/v1/workers/{gone}")
    assert gone not in {each.id for each in client.allocations().allocations}
    assert client.allocations(ended=True, limit=1).allocations[0].id == gone


def test_the_cost_of_an_allocation_includes_its_idle_time(http: TestClient) -> None:
    here = Place(api := Api(http), "cost")
    worker = here.register()
    trial = here.add()
    lease = api.lease(worker)
    outcome = completed(LAYOUT, duration_s=10.0, tokens_per_s=2048.0)  # 12 steps of half a second
    body = {"worker_id": worker, "attempt": lease["attempt"], "outcome": outcome.to_mapping()}
    api.post(f"/trials/{trial}/outcome", body | {"nodes_held": 1.0, "iterations_s": 6.0})
    beat(api, worker, status={"idle_node_s": 30.0})
    assert api.get(f"/allocations/{worker}")["cost"]["total"] < 15, "it registered just now"
    change_workers(api, registered_at=datetime.now(UTC) - timedelta(hours=1))
    beat(api, worker, status={"idle_node_s": 30.0})
    api.store.allocations.share_idle_time()
    # One device of a node of four was used.
    probe = {"iterations": 1.5, "start": 1.0, "idle": 7.5, "lost": 0.0, "total": 10.0}
    read = api.get(f"/trials/{trial}")
    assert (read["cost"], read["node_seconds"]) == (probe, 10.0)
    held_for_nobody = {**probe, "idle": 37.5, "total": 40.0}
    assert api.get(f"/allocations/{worker}")["cost"] == held_for_nobody
    campaign = here.read()
    assert (campaign["cost"], campaign["node_seconds"]) == (held_for_nobody, 10.0)
    metrics = http.get("/metrics").text.splitlines()
    assert 'layout_tuner_node_seconds{part="idle"} 37.5' in metrics

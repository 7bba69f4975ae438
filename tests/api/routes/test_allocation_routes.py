from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update

from api.client import Client
from api.errors import ServiceError
from results_db.models.service_tables import WorkerRow
from search_spaces.spec.layout import Layout
from tests.kit.allocation import ALLOCATION, NODES, beat, node, register
from tests.kit.api import Api
from tests.kit.store import completed

LAYOUT = Layout(num_microbatches=8)


SLOW = node("n2", "quarantined", reason="slow")
SET_ASIDE = (
    "it needs 2 nodes, and 1 of the 2 here are lost or in quarantine (n2: slow); "
    "`layout-tuner allocation release` ends that"
)


@pytest.fixture
def campaign_id(api: Api) -> int:
    return int(api.submit()["id"])


def why_it_waits(api: Api) -> Any:
    return api.get("/campaigns/first")["progress"]["waiting_reason"]


def test_an_allocation_is_listed_with_what_its_worker_says_of_it_and_on_wish_after_its_end(
    api: Api,
) -> None:
    worker = register(api)
    (read,) = api.get("/allocations")["allocations"]
    assert read["id"] == worker
    said = [read[name] for name in ("cluster", "scheduler", "job_id", "launcher")]
    assert said == ["local-cpu", "slurm", "4711", "srun"]
    assert 3500 < read["seconds_left"] <= 3600
    assert (read["shares_nodes"], read["state"], read["status_at"]) == (True, "working", None)
    assert {n["name"]: n["state"] for n in read["nodes"]} == {"n1": "starting", "n2": "starting"}
    busy = node("n1", "busy", doing="trial 3 of first", free_devices=2, health={"gemm": [1.5, 2.5]})
    beat(api, worker, busy, node("n2", "lost", reason="no answer"), status={"ends_in_s": 60.0})
    read = api.get(f"/allocations/{worker}")
    assert read["nodes"][0] == {**busy, "num_devices": 4, "reason": ""}
    assert (read["nodes"][1]["state"], read["nodes"][1]["reason"]) == ("lost", "no answer")
    assert 0 < read["seconds_left"] <= 60

    api.http.delete(f"/v1/workers/{worker}")
    assert api.get("/allocations")["allocations"] == []
    (read,) = api.get("/allocations", all=True)["allocations"]
    assert (read["id"], read["state"], read["not_leased"]) == (worker, "ended", [])


def test_allocations_are_found_by_worker_job_or_session_however_many_came_after(api: Api) -> None:
    first = register(api)
    api.http.delete(f"/v1/workers/{first}")
    others = [
        register(api, f"w{n}", allocation=ALLOCATION | {"job_id": str(n)}) for n in range(2, 5)
    ]
    for name in (first, "w1", "4711"):
        (found,) = api.get("/allocations", all=True, limit=1, name=name)["allocations"]
        assert found["id"] == first
    assert api.get("/allocations", name="4711")["allocations"] == []
    (found,) = api.get("/allocations", name="3")["allocations"]
    assert found["id"] == others[1]


def test_leased_trials_show_the_phase_that_the_worker_reports(api: Api, campaign_id: int) -> None:
    worker = register(api)
    for micro_batch_size in (1, 2):
        api.store.trials.add(campaign_id, Layout(micro_batch_size=micro_batch_size))
    leases = [api.lease(worker), api.lease(worker)]
    because = "2 devices are free, it needs 4"
    trials = [
        {"phase": "iterating", "iterations_done": 3, "held_s": 1e-3, "nodes_held": 0.25},
        {"phase": "waiting", "iterations_done": 0, "held_s": 0.0, "waiting_because": because},
    ]
    for lease, trial in zip(leases, trials, strict=True):
        trial |= {"trial_id": lease["trial_id"], "attempt": 1}
    beat(api, worker, trials=trials)
    read = api.get(f"/allocations/{worker}")
    (running,), (waiting,) = read["running"], read["waiting"]
    assert (running["number"], running["phase"], running["held_s"]) == (1, "iterating", 1e-3)
    assert (running["nodes_held"], running["iterations_done"]) == (0.25, 3)
    assert (waiting["number"], waiting["waiting_because"]) == (2, because)
    attempt = api.get(f"/trials/{leases[1]['trial_id']}")["attempts"][0]
    assert attempt["waiting_because"] == because


def test_a_campaign_whose_leased_trials_all_wait_says_why_until_an_outcome_came(
    api: Api, campaign_id: int
) -> None:
    worker = register(api)
    api.store.trials.add(campaign_id, LAYOUT)
    lease = api.lease(worker)
    trial = {"trial_id": lease["trial_id"], "attempt": 1, "iterations_done": 0}
    waits = {**trial, "phase": "waiting", "waiting_because": "every node is busy"}
    beat(api, worker, trials=[waits])
    assert why_it_waits(api) == "every node is busy"
    beat(api, worker, trials=[{**trial, "phase": "starting"}])
    assert why_it_waits(api) is None

    api.store.trials.add(campaign_id, Layout(tp=2, num_microbatches=8))
    other = {**waits, "trial_id": api.lease(worker)["trial_id"]}
    beat(api, worker, trials=[{**trial, "phase": "iterating"}, other])
    api.report(worker, lease, completed(LAYOUT))
    assert why_it_waits(api) is None


@pytest.mark.parametrize(
    ("layout", "nodes", "status", "why"),
    [
        (Layout(dp=8), (), {}, "it needs 8 devices on 1 node, and a node here has 4"),
        (Layout(num_nodes=3, dp=3), (), {}, "it needs 3 nodes, and there are 2 here"),
        (Layout(num_nodes=2, dp=2), (node("n1"), SLOW), {}, SET_ASIDE),
        (Layout(), (), {"ends_in_s": 100.0}, "its probe may take 300 s, and "),
        (Layout(), (), {"state": "draining"}, "the allocation drains: it takes no more trials"),
    ],
)
def test_a_trial_that_an_allocation_will_not_lease_says_why(
    api: Api, campaign_id: int, layout: Layout, nodes: Any, status: Any, why: str
) -> None:
    worker = register(api)
    beat(api, worker, *nodes, status=status)
    api.store.trials.add(campaign_id, layout)
    read = api.get(f"/allocations/{worker}")
    assert read["num_not_leased"] == 1
    assert read["not_leased"][0]["reason"].startswith(why)
    assert (read["not_leased"][0]["campaign"], read["not_leased"][0]["number"]) == ("first", 1)
    if layout.num_nodes == 1 and layout.dp == 1:
        waits = why_it_waits(api)
        assert waits.startswith(f"trial 1 waits: no allocation may run it; w1: {why}")


def test_a_trial_that_fits_waits_for_devices_or_for_its_campaign(
    api: Api, campaign_id: int
) -> None:
    worker = register(api)
    api.store.trials.add(campaign_id, LAYOUT)
    (waiting,) = api.get(f"/allocations/{worker}")["not_leased"]
    assert waiting["reason"].startswith("it fits, and waits until devices are free")
    assert why_it_waits(api) is None
    api.post("/campaigns/first/pause")
    (waiting,) = api.get(f"/allocations/{worker}")["not_leased"]
    assert waiting["reason"] == "its campaign is paused"
    elsewhere = register(api, "w2", cluster="frontier")
    assert api.get(f"/allocations/{elsewhere}")["num_not_leased"] == 0


def test_a_trial_waits_while_nodes_start_or_the_worker_is_silent(
    api: Api, campaign_id: int
) -> None:
    worker = register(api)
    api.store.trials.add(campaign_id, LAYOUT)
    beat(api, worker, status={"state": "starting"})
    (waiting,) = api.get(f"/allocations/{worker}")["not_leased"]
    assert waiting["reason"] == "the allocation's nodes are not ready yet"
    with api.store._db.write() as session:
        session.connection().exec_driver_sql("UPDATE workers SET seen_at = '2026-01-01 00:00:00'")
    read = api.get(f"/allocations/{worker}")
    assert read["state"] == "silent"
    assert read["not_leased"][0]["reason"] == "worker w1 was not heard of lately"


def test_the_most_suitable_allocation_says_why_a_trial_waits(api: Api, campaign_id: int) -> None:
    api.store.trials.add(campaign_id, Layout(num_nodes=2, dp=8))
    register(api, "small", num_nodes=1, nodes=NODES[:1])
    large = register(api, "large")
    beat(api, large, status={"ends_in_s": 100.0})
    waits = why_it_waits(api)
    assert waits.startswith("trial 1 waits: no allocation may run it; large: its probe may take")
    beat(api, large, status={"ends_in_s": 1000.0})
    assert why_it_waits(api) is None


def test_the_cost_of_an_allocation_includes_its_idle_time(api: Api, campaign_id: int) -> None:
    worker = register(api)
    trial = api.store.trials.add(campaign_id, LAYOUT)
    lease = api.lease(worker)
    outcome = completed(LAYOUT, duration_s=10.0, tokens_per_s=2048.0)  # 12 steps of half a second
    body = {"worker_id": worker, "attempt": lease["attempt"], "outcome": outcome.to_mapping()}
    body |= {"nodes_held": 1.0, "iterations_s": 6.0}
    api.post(f"/trials/{trial.id}/outcome", body)
    beat(api, worker, status={"idle_node_s": 30.0})
    assert api.get(f"/allocations/{worker}")["cost"]["total"] < 15, "it registered just now"
    with api.store._db.write() as session:
        an_hour_ago = datetime.now(UTC) - timedelta(hours=1)
        session.execute(update(WorkerRow).values(registered_at=an_hour_ago))
    beat(api, worker, status={"idle_node_s": 30.0})
    api.store.allocations.share_idle_time()
    # One device of a node of four was used.
    probe = {"iterations": 1.5, "start": 1.0, "idle": 7.5, "lost": 0.0, "total": 10.0}
    read = api.get(f"/trials/{trial.id}")
    assert (read["cost"], read["node_seconds"]) == (probe, 10.0)
    held_for_nobody = {**probe, "idle": 37.5, "total": 40.0}
    assert api.get(f"/allocations/{worker}")["cost"] == held_for_nobody
    campaign = api.get("/campaigns/first")
    assert (campaign["cost"], campaign["node_seconds"]) == (held_for_nobody, 10.0)
    metrics = api.http.get("/metrics").text.splitlines()
    assert 'layout_tuner_node_seconds{part="idle"} 37.5' in metrics


def test_a_node_that_a_worker_quarantined_is_released_through_its_worker(api: Api) -> None:
    worker = register(api)
    slow = node("n2", "quarantined", reason="two probes failed here and ran elsewhere")
    assert beat(api, worker, node("n1"), slow)["release"] == []
    (first, second) = api.get("/nodes", cluster="local-cpu")["nodes"]
    assert (first["name"], first["quarantine"], first["node"]["state"]) == ("n1", None, "idle")
    assert second["quarantine"]["reason"] == "two probes failed here and ran elsewhere"
    assert second["quarantine"]["requested_by_user"] is False
    assert second["allocation"] == worker

    released = api.post("/nodes/local-cpu/n2/release")
    assert released["quarantine"]["released_at"] is not None
    for _ in range(2):
        assert beat(api, worker, node("n1"), slow)["release"] == ["n2"]
    told = beat(api, worker, node("n1"), node("n2", "checking"))
    assert (told["release"], told["quarantine"]) == ([], [])


def test_the_client_reads_allocations_and_quarantines_nodes(api: Api, client: Client) -> None:
    worker = register(api)
    (listed,) = client.allocations().allocations
    one = client.allocation(worker)
    assert (listed.id, listed.nodes, listed.cost) == (one.id, one.nodes, one.cost)
    assert client.allocations(ended=True, limit=1).allocations[0].id == worker
    assert client.quarantine_node("local-cpu", "n1", "loud").quarantine is not None
    assert [n.name for n in client.nodes("local-cpu").nodes] == ["n1", "n2"]
    released = client.release_node("local-cpu", "n1").quarantine
    assert released is not None
    assert released.released_at is not None
    with pytest.raises(ServiceError, match="is not in quarantine"):
        client.release_node("local-cpu", "n1")

"""The service in trouble: killed in the middle, and many workers at once."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from results_db.database.data_dir import DataDir
from results_db.store import Store
from search_spaces.spec.layout import Layout
from tests.kit.api import CAMPAIGN, INTRODUCTION, measured_as_asked
from tests.kit.services import ServeProcess
from tests.kit.store import TimelyStore

NODES = [{"name": f"n{number}", "num_devices": 4} for number in range(4)]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServeProcess]:
    service = ServeProcess(tmp_path)
    yield service
    service.end()


@pytest.fixture
def store(service: ServeProcess) -> Iterator[Store]:
    store = TimelyStore(DataDir(service.data_dir).database_url)
    yield store
    store.close()


def register(service: ServeProcess, name: str) -> str:
    body = {**INTRODUCTION, "name": name, "cluster": "local-cpu", "num_nodes": 4}
    body |= {"devices_per_node": 4, "nodes": NODES}
    body |= {"allocation": {"scheduler": "slurm", "job_id": "7", "ends_in_s": 7200.0}}
    return str(service.post("/workers", body)["worker_id"])


def lease(service: ServeProcess, worker: str, number: int) -> list[dict[str, Any]]:
    body = {"max_trials": number, "wait_s": 0, "room": {"nodes": 4, "devices": 0}}
    leases: list[dict[str, Any]] = service.post(f"/workers/{worker}/leases", body)["leases"]
    return leases


def beat(
    service: ServeProcess, worker: str, leases: list[dict[str, Any]], idle_node_s: float
) -> Any:
    held = {"iterations_done": 1, "held_s": 2.0, "nodes_held": 0.5}
    trials = [
        {"trial_id": lease["trial_id"], "attempt": lease["attempt"], **held} for lease in leases
    ]
    nodes = [{"name": node["name"], "state": "busy", "doing": worker} for node in NODES]
    status = {"state": "working", "ends_in_s": 60.0, "idle_node_s": idle_node_s, "nodes": nodes}
    return service.post(f"/workers/{worker}/heartbeats", {"trials": trials, "status": status})


def set_back(store: Store, column: str) -> None:
    """Sets a time of all rows back by far more than what workers here report as passed."""
    table, name = column.split(".")
    with store._db.write() as session:
        long_ago = f"UPDATE {table} SET {name} = '2026-01-01 00:00:00.000000'"
        session.connection().exec_driver_sql(long_ago)


def add_trials(store: Store, campaign_id: int, number: int) -> None:
    for size in range(1, number + 1):
        store.trials.add(campaign_id, Layout(micro_batch_size=size))


@pytest.mark.slow
def test_a_service_that_is_killed_comes_back_with_leases_wishes_and_statuses(
    service: ServeProcess, store: Store
) -> None:
    campaign = service.post("/campaigns", CAMPAIGN)
    add_trials(store, campaign["id"], 4)
    worker = register(service, "w1")
    set_back(store, "workers.registered_at")
    leases = lease(service, worker, 4)
    beat(service, worker, leases, idle_node_s=10.0)
    service.post("/nodes/local-cpu/n3/quarantine", {"reason": "loud"})

    service.end(signal.SIGKILL)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{service.service['url']}/v1/health", trust_env=False)
    # As after an hour without a service: by the clock every lease has run out long ago.
    set_back(store, "trials.lease_expires_at")
    service.start()

    trials = service.get("/campaigns/first/trials")["trials"]
    assert [(trial["state"], trial["attempt"]) for trial in trials] == [("RUNNING", 1)] * 4
    told = beat(service, worker, leases, idle_node_s=10.0)
    quarantined = [{"node": "n3", "reason": "loud"}]
    assert told == {"stop": [], "release": [], "quarantine": quarantined}
    (allocation,) = service.get("/allocations")["allocations"]
    assert [node["state"] for node in allocation["nodes"]] == ["busy"] * 4
    assert len(allocation["running"]) == 4
    assert 0 < allocation["seconds_left"] <= 60
    assert allocation["cost"]["idle"] == 10.0, "what was told before the service died counts once"


@pytest.mark.slow
def test_workers_that_post_at_once_lose_nothing_and_are_charged_once(
    service: ServeProcess, store: Store
) -> None:
    campaign = service.post("/campaigns", {**CAMPAIGN, "budget": {"trials": 99}})
    add_trials(store, campaign["id"], 24)

    def work(name: str) -> float:
        worker = register(service, name)
        set_back(store, "workers.registered_at")
        idle_node_s = 0.0
        while leases := lease(service, worker, 4):
            set_back(store, "attempts.started_at")
            idle_node_s += 5.0
            for _ in range(2):
                assert beat(service, worker, leases, idle_node_s)["stop"] == []
            for leased in leases:
                layout = Layout.from_mapping(leased["request"]["layout"])
                outcome = measured_as_asked(leased, layout, duration_s=8.0, tokens_per_s=1e5)
                body = {"worker_id": worker, "attempt": leased["attempt"]}
                body["outcome"] = outcome.to_mapping()
                body |= {"nodes_held": 0.5, "iterations_s": 2.0}
                path = f"/trials/{leased['trial_id']}/outcome"
                for _ in range(2):
                    assert service.post(path, body)["accepted"]
        return idle_node_s

    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(work, ("w0", "w1", "w2"), timeout=90))
    store.allocations.share_idle_time()
    read = service.get("/campaigns/first")
    assert read["progress"]["trials"]["COMPLETED"] == 24
    # One device of the two that each probe held, for 2 s and for 8 s in all.
    expected = {"iterations": 24 * 0.5, "start": 24 * 1.5, "lost": 0.0}
    assert {part: read["cost"][part] for part in expected} == pytest.approx(expected)
    assert read["cost"]["idle"] == pytest.approx(24 * 2.0 + sum(told))
    assert read["node_seconds"] == pytest.approx(24 * 4.0)

"""Workers over HTTP: sessions, leases that wait for work, and refused measurements.

What a worker and the service exchange, field by field, is recorded in the golden documents.
"""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from layout_tuner.api.settings import Settings
from layout_tuner.protocol.worker_messages import LeaseRequest, OutcomeReport, WorkerCreate
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.workers.errors import TokenRefusedError
from layout_tuner.workers.service.lease_client import LeaseClient
from layout_tuner.workers.worker.outcome_posting import Outbox
from layout_tuner.workers.worker.outcome_spool import Spool
from tests.kit.allocation import Place
from tests.kit.api import CAMPAIGN, HEADERS, INTRODUCTION, TOKEN, Api
from tests.kit.live import live_service
from tests.kit.store import completed


def test_a_session_that_ended_or_whose_name_was_taken_is_refused(api: Api) -> None:
    told = api.post("/workers", {**INTRODUCTION, "name": "ends"}, status=201)
    assert (told["lease_s"], told["heartbeat_interval_s"]) == (15.0, 2.0)
    assert "ends" in [each["name"] for each in api.get("/workers")["workers"]]
    assert api.get("/health")["workers"] >= 1
    before = told["worker_id"]
    assert api.http.delete(f"/v1/workers/{before}").status_code == 204

    def refusals(worker: str, status: int) -> str:
        problem = api.post(f"/workers/{worker}/heartbeats", {"trials": []}, status=status)
        api.post(f"/workers/{worker}/leases", {"wait_s": 0}, status=status)
        assert api.http.delete(f"/v1/workers/{worker}").status_code == status
        return str(problem["detail"])

    for worker in (before, "nobody"):
        assert "register again" in refusals(worker, 404)
    api.register("ends")
    assert refusals(before, 409) == "another worker has registered as 'ends'"


def test_a_lease_waits_for_a_trial_and_is_answered_without_one_after_its_time(api: Api) -> None:
    here = Place(api, "waiting")
    worker = here.register()
    started = time.monotonic()
    assert api.post(f"/workers/{worker}/leases", {"wait_s": 0.3}) == {"leases": []}
    assert time.monotonic() - started >= 0.3
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(api.post, f"/workers/{worker}/leases", {"wait_s": 20})
        here.add()
        (lease,) = asking.result(10)["leases"]
    assert (lease["campaign"], lease["number"], lease["attempt"]) == ("waiting", 1, 1)


def test_a_client_that_hangs_up_gets_no_lease(http: TestClient) -> None:
    here = Place(api := Api(http), "hung-up")
    worker = here.register()
    body = json.dumps({"wait_s": 20}).encode()
    said: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not said:
            said.append({"type": "http.request", "body": body, "more_body": False})
        elif len(said) == 1:
            # Work comes at the very moment when nobody is there to take it.
            here.add()
            said.append({"type": "http.disconnect"})
        return said[-1]

    async def send(_message: Any) -> None:
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": f"/v1/workers/{worker}/leases",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"authorization", HEADERS["Authorization"].encode()),
        ],
    }
    asyncio.run(api.http.app(scope, receive, send))
    assert [message["type"] for message in said] == ["http.request", "http.disconnect"]
    (trial,) = api.get("/campaigns/hung-up/trials")["trials"]
    assert (trial["state"], trial["attempt"]) == ("PENDING", 0)


@pytest.mark.parametrize(
    ("name", "asked", "numbers"),
    [
        ("anything", {}, [1, 2, 3]),
        ("two-nodes", {"room": {"nodes": 2, "devices": 0}}, [1, 2, 3]),
        ("one-node", {"room": {"nodes": 1, "devices": 0}}, [2, 3]),
        ("four-devices", {"room": {"nodes": 0, "devices": 4}}, [2, 3]),
        ("two-devices", {"room": {"nodes": 0, "devices": 2}}, [3]),
        ("no-room", {"room": {"nodes": 0, "devices": 0}}, []),
        ("too-short", {"longest_s": 299.0}, []),
        ("long-enough", {"longest_s": 300.0}, [1, 2, 3]),
    ],
)
def test_a_worker_leases_what_its_room_and_its_time_allow_the_oldest_first(
    api: Api, name: str, asked: dict[str, Any], numbers: list[int]
) -> None:
    here = Place(api, name)
    worker = here.register()
    for layout in (Layout(num_nodes=2, dp=8), Layout(dp=4), Layout(dp=1)):
        here.add(layout)
    body = {"max_trials": 9, "wait_s": 0, **asked}
    leases = api.post(f"/workers/{worker}/leases", body)["leases"]
    assert [lease["number"] for lease in leases] == numbers


def test_a_measurement_that_the_service_refuses_ends_its_trial_with_the_refusal(
    store: Store, tmp_path: Path
) -> None:
    identity = WorkerCreate(**{**INTRODUCTION, "cluster": "local-cpu"})
    layout = Layout(tp=2, num_microbatches=8)
    with (
        live_service(Settings(token=TOKEN), store) as url,
        httpx.Client(base_url=url, headers=HEADERS) as http,
        LeaseClient(url.removesuffix("/v1"), "wrong") as stranger,
        LeaseClient(url.removesuffix("/v1"), TOKEN) as client,
        Spool(tmp_path / "spool") as spool,
    ):
        with pytest.raises(TokenRefusedError, match="token"):
            stranger.register(identity)
        trial = store.trials.add(http.post("/campaigns", json=CAMPAIGN).json()["id"], layout)
        worker_id = client.register(identity).worker_id
        lease = client.lease(worker_id, LeaseRequest(wait_s=5))
        assert lease.trial_id == trial.id
        outcome = completed(layout, peak_memory_bytes=9)
        report = OutcomeReport(
            trial_id=trial.id, attempt=lease.attempt, worker_id=worker_id, outcome=outcome
        )
        outbox = Outbox(client, spool)
        outbox.keep(report)
        assert not outbox.post()
        ended = http.get(f"/trials/{trial.id}").json()
        page = http.get(f"{url.removesuffix('/v1')}/trials/{trial.id}").text
    assert (ended["state"], ended["reason"], ended["attempt"]) == ("FAILED", "implausible", 1)
    refusal = f"the service refused the measurement: the measurement of {layout.key}: peak_memory"
    assert ended["message"].startswith(refusal)
    assert "is less than a rank of the layout certainly holds" in ended["message"]
    assert refusal.removeprefix("the") in page
    assert [path.name for path in (tmp_path / "spool" / "rejected").iterdir()]

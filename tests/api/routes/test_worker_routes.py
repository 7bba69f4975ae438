import asyncio
import json
import threading
import time
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.settings import Settings
from search_spaces.spec.layout import Layout
from tests.kit.allocation import register
from tests.kit.api import HEADERS, INTRODUCTION, Api

LAYOUT = Layout(num_microbatches=8)


@pytest.fixture
def campaign_id(api: Api) -> int:
    return int(api.submit()["id"])


def test_registration_returns_the_heartbeat_interval(api: Api) -> None:
    told = api.post("/workers", INTRODUCTION, status=201)
    assert told["lease_s"] == 15.0
    assert told["heartbeat_interval_s"] == 2.0
    assert api.get("/workers")["workers"][0]["name"] == "w"
    assert api.get("/health")["workers"] == 1


def test_a_waiting_lease_takes_a_trial_when_it_comes(api: Api, campaign_id: int) -> None:
    worker = api.register()
    leases: list[Any] = []

    def ask() -> None:
        leases.extend(api.post(f"/workers/{worker}/leases", {"wait_s": 20})["leases"])

    thread = threading.Thread(target=ask)
    thread.start()
    api.store.trials.add(campaign_id, LAYOUT)
    thread.join(10)
    assert not thread.is_alive()
    assert leases[0]["campaign"] == "first"
    assert (leases[0]["number"], leases[0]["attempt"]) == (1, 1)


def test_a_lease_without_work_answers_after_its_wait(api: Api) -> None:
    worker = api.register()
    started = time.monotonic()
    assert api.post(f"/workers/{worker}/leases", {"wait_s": 0.3}) == {"leases": []}
    assert time.monotonic() - started >= 0.3


def test_a_waiting_lease_is_answered_when_the_service_ends(api: Api, settings: Settings) -> None:
    worker = api.register()
    answers: list[Any] = []
    thread = threading.Thread(
        target=lambda: answers.append(api.post(f"/workers/{worker}/leases", {"wait_s": 20}))
    )
    thread.start()
    settings.stopping.set()
    thread.join(10)
    assert answers == [{"leases": []}]


def test_a_client_that_hangs_up_gets_no_lease(api: Api, campaign_id: int) -> None:
    worker = api.register()
    body = json.dumps({"wait_s": 20}).encode()
    said: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not said:
            said.append({"type": "http.request", "body": body, "more_body": False})
        elif len(said) == 1:
            # Work comes at the very moment when nobody is there to take it.
            api.store.trials.add(campaign_id, LAYOUT)
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
    (trial,) = api.get("/campaigns/first/trials")["trials"]
    assert (trial["state"], trial["attempt"]) == ("PENDING", 0)


def test_a_session_that_ended_or_whose_name_was_taken_is_refused(
    api: Api, http: TestClient
) -> None:
    before = api.register("w1")
    assert http.delete(f"/v1/workers/{before}").status_code == 204
    for worker in (before, "nobody"):
        problem = api.post(f"/workers/{worker}/heartbeats", {"trials": []}, status=404)
        assert "register again" in problem["detail"]
        api.post(f"/workers/{worker}/leases", {"wait_s": 0}, status=404)
        assert http.delete(f"/v1/workers/{worker}").status_code == 404

    api.register("w1")
    problem = api.post(f"/workers/{before}/heartbeats", {"trials": []}, status=409)
    assert problem["detail"] == "another worker has registered as 'w1'"
    api.post(f"/workers/{before}/leases", {"wait_s": 0}, status=409)
    assert http.delete(f"/v1/workers/{before}").status_code == 409


@pytest.mark.parametrize(
    ("room", "longest_s", "numbers"),
    [
        (None, None, [1, 2, 3]),
        ({"nodes": 2, "devices": 0}, None, [1, 2, 3]),
        ({"nodes": 1, "devices": 0}, None, [2, 3]),
        ({"nodes": 0, "devices": 4}, None, [2, 3]),
        ({"nodes": 0, "devices": 2}, None, [3]),
        ({"nodes": 0, "devices": 0}, None, []),
        (None, 299.0, []),
        (None, 300.0, [1, 2, 3]),
    ],
)
def test_a_worker_leases_what_its_room_and_its_time_allow_the_oldest_first(
    api: Api, campaign_id: int, room: Any, longest_s: float | None, numbers: list[int]
) -> None:
    worker = register(api)
    for layout in (Layout(num_nodes=2, dp=8), Layout(dp=4), Layout(dp=1)):
        api.store.trials.add(campaign_id, layout)
    body = {"max_trials": 9, "wait_s": 0, "room": room, "longest_s": longest_s}
    leases = api.post(f"/workers/{worker}/leases", body)["leases"]
    assert [lease["number"] for lease in leases] == numbers

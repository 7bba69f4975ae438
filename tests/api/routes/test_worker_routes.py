import asyncio
import dataclasses
import json
import threading
import time
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.settings import Settings
from search_spaces.spec.layout import Layout
from tests.kit.api import HEADERS, INTRODUCTION, Api
from tests.kit.store import completed

LAYOUT = Layout(num_microbatches=8)


@pytest.fixture
def campaign_id(api: Api) -> int:
    return int(api.submit()["id"])


def outcome_body(worker_id: str, attempt: int = 1, **changes: Any) -> dict[str, Any]:
    outcome = dataclasses.asdict(completed(LAYOUT))
    return {"worker_id": worker_id, "attempt": attempt, "outcome": {**outcome, **changes}}


def test_registration_returns_the_heartbeat_interval(api: Api) -> None:
    told = api.post("/workers", INTRODUCTION, status=201)
    assert told["lease_s"] == 15.0
    assert told["heartbeat_interval_s"] == 2.0
    assert api.get("/workers")["workers"][0]["name"] == "w"
    assert api.get("/health")["workers"] == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_nodes": 0}, "body.num_nodes"),
        ({"name": ""}, "body.name"),
        ({"speed": 1}, "body.speed"),
    ],
)
def test_an_invalid_registration_is_refused(
    http: TestClient, changes: dict[str, Any], named: str
) -> None:
    answer = http.post("/v1/workers", json={**INTRODUCTION, **changes})
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == [named]


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


def test_a_wait_longer_than_twenty_seconds_is_refused(api: Api) -> None:
    worker = api.register()
    api.post(f"/workers/{worker}/leases", {"wait_s": 21}, status=422)


def test_a_heartbeat_names_the_trials_to_stop(api: Api, campaign_id: int) -> None:
    worker = api.register()
    trial = api.store.trials.add(campaign_id, LAYOUT)
    api.lease(worker)
    beat = {"trials": [{"trial_id": trial.id, "attempt": 1, "iterations_done": 4}]}
    assert api.post(f"/workers/{worker}/heartbeats", beat)["stop"] == []
    assert api.get(f"/trials/{trial.id}")["iterations_done"] == 4
    api.post("/campaigns/first/cancel")
    assert api.post(f"/workers/{worker}/heartbeats", beat)["stop"] == [trial.id]


def test_an_unknown_or_ended_session_is_a_404(api: Api, http: TestClient) -> None:
    before = api.register("w1")
    assert http.delete(f"/v1/workers/{before}").status_code == 204
    for worker in (before, "nobody"):
        problem = api.post(f"/workers/{worker}/heartbeats", {"trials": []}, status=404)
        assert "register again" in problem["detail"]
        api.post(f"/workers/{worker}/leases", {"wait_s": 0}, status=404)
        assert http.delete(f"/v1/workers/{worker}").status_code == 404


def test_a_session_whose_name_was_taken_is_a_409(api: Api, http: TestClient) -> None:
    before = api.register("w1")
    api.register("w1")
    problem = api.post(f"/workers/{before}/heartbeats", {"trials": []}, status=409)
    assert problem["detail"] == "another worker has registered as 'w1'"
    api.post(f"/workers/{before}/leases", {"wait_s": 0}, status=409)
    assert http.delete(f"/v1/workers/{before}").status_code == 409


def test_a_worker_that_drains_gives_its_trials_back(
    api: Api, http: TestClient, campaign_id: int
) -> None:
    worker = api.register()
    trial = api.store.trials.add(campaign_id, LAYOUT)
    api.lease(worker)
    assert http.delete(f"/v1/workers/{worker}").status_code == 204
    assert api.get(f"/trials/{trial.id}")["state"] == "PENDING"
    assert api.get("/workers")["workers"] == []


def test_an_outcome_is_taken_once_however_often_it_is_posted(api: Api, campaign_id: int) -> None:
    worker = api.register()
    trial = api.store.trials.add(campaign_id, LAYOUT)
    lease = api.lease(worker)
    first = api.report(worker, lease, completed(LAYOUT, tokens_per_s=100.0))
    again = api.report(worker, lease, completed(LAYOUT, tokens_per_s=100.0))
    assert first == again == {"accepted": True, "state": "COMPLETED", "reason": ""}
    other = api.report(worker, lease, completed(LAYOUT, tokens_per_s=999.0))
    assert other == {
        "accepted": False,
        "state": "COMPLETED",
        "reason": "the attempt has reported another outcome, which stays",
    }
    assert api.get(f"/trials/{trial.id}")["measurement"]["tokens_per_s"] == 100.0


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"state": "failed"}, 422),
        ({"duration_s": "3"}, 422),
        ({"log_tail": "\ud800"}, 422),
        ({"mood": "good"}, 422),
    ],
)
def test_an_impossible_outcome_is_refused_and_the_trial_goes_on(
    api: Api, campaign_id: int, changes: dict[str, Any], status: int
) -> None:
    worker = api.register()
    trial = api.store.trials.add(campaign_id, LAYOUT)
    api.lease(worker)
    answer = api.http.post(
        f"/v1/trials/{trial.id}/outcome",
        content=json.dumps(outcome_body(worker, **changes)),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == status, answer.text
    assert answer.json()["detail"]
    assert api.get(f"/trials/{trial.id}")["state"] == "RUNNING"


def test_an_outcome_s_wrong_field_is_named(api: Api, campaign_id: int) -> None:
    worker = api.register()
    trial = api.store.trials.add(campaign_id, LAYOUT)
    api.lease(worker)
    body = outcome_body(worker)
    body["outcome"]["measurement"]["iterations"][1]["loss"] = "6.0"
    problem = api.post(f"/trials/{trial.id}/outcome", body, status=422)
    assert problem["detail"] == (
        "body.outcome.measurement.iterations.1.loss: '6.0' is not a finite number or null"
    )


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/trials/{trial}/outcome", {"attempt": "1"}),
        ("/workers/{worker}/leases", {"wait_s": "0"}),
        (
            "/workers/{worker}/heartbeats",
            {"trials": [{"trial_id": "1", "attempt": 1, "iterations_done": 0}]},
        ),
    ],
)
def test_a_number_in_a_string_is_refused(
    api: Api, campaign_id: int, path: str, body: dict[str, Any]
) -> None:
    worker = api.register()
    trial = api.store.trials.add(campaign_id, LAYOUT)
    if "outcome" in path:
        api.lease(worker)
        body = {**outcome_body(worker), **body}
    problem = api.post(path.format(trial=trial.id, worker=worker), body, status=422)
    assert len(problem["errors"]) == 1


def test_an_unknown_attempt_is_a_conflict(api: Api, campaign_id: int) -> None:
    worker = api.register()
    trial = api.store.trials.add(campaign_id, LAYOUT)
    api.lease(worker)
    body = outcome_body(worker, attempt=5)
    problem = api.post(f"/trials/{trial.id}/outcome", body, status=409)
    assert "no attempt 5" in problem["detail"]
    api.post("/trials/999/outcome", body, status=404)
    api.post(f"/trials/{'9' * 30}/outcome", body, status=422)
    api.post("/trials/0/outcome", body, status=422)

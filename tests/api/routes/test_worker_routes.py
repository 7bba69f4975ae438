import asyncio
import dataclasses
import json
import math
import threading
import time
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.settings import Settings
from search_spaces.protocol.outcome import Outcome
from search_spaces.spec.layout import Layout
from tests.api.local_api import HEADERS, INTRODUCTION, Api
from tests.results_db.factories import completed, failed

LAYOUT = Layout(num_microbatches=8)


@pytest.fixture
def campaign_id(api: Api) -> int:
    return int(api.submit()["id"])


def outcome_body(worker_id: str, attempt: int = 1, **changes: Any) -> dict[str, Any]:
    outcome = dataclasses.asdict(completed(LAYOUT))
    return {"worker_id": worker_id, "attempt": attempt, "outcome": {**outcome, **changes}}


def test_a_worker_learns_how_often_to_beat(api: Api) -> None:
    told = api.post("/workers", INTRODUCTION, status=201)
    assert told["lease_s"] == 15.0
    assert told["heartbeat_interval_s"] == 2.0
    assert api.get("/workers")["workers"][0]["name"] == "w"
    assert api.get("/health")["workers"] == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_nodes": 0}, "body.num_nodes"),
        ({"devices_per_node": 10**30}, "body.devices_per_node"),
        ({"name": ""}, "body.name"),
        ({"name": None}, "body.name"),
        ({"speed": 1}, "body.speed"),
    ],
)
def test_a_worker_that_introduces_itself_badly_is_refused(
    http: TestClient, changes: dict[str, Any], named: str
) -> None:
    answer = http.post("/v1/workers", json={**INTRODUCTION, **changes})
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == [named]


def test_a_lease_waits_for_work_and_takes_it_when_it_comes(api: Api, campaign_id: int) -> None:
    worker = api.register()
    leases: list[Any] = []

    def ask() -> None:
        leases.extend(api.post(f"/workers/{worker}/leases", {"wait_s": 20})["leases"])

    thread = threading.Thread(target=ask)
    thread.start()
    api.store.add_trial(campaign_id, LAYOUT)
    thread.join(10)
    assert not thread.is_alive()
    assert leases[0]["campaign"] == "first"
    assert (leases[0]["number"], leases[0]["attempt"]) == (1, 1)


def test_a_lease_that_finds_nothing_answers_when_its_time_is_up(api: Api) -> None:
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


def test_a_client_that_hangs_up_while_it_waits_is_given_nothing(api: Api, campaign_id: int) -> None:
    worker = api.register()
    body = json.dumps({"wait_s": 20}).encode()
    said: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not said:
            said.append({"type": "http.request", "body": body, "more_body": False})
        elif len(said) == 1:
            # Work comes at the very moment when nobody is there to take it.
            api.store.add_trial(campaign_id, LAYOUT)
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
    trial = api.store.add_trial(campaign_id, LAYOUT)
    api.lease(worker)
    beat = {"trials": [{"trial_id": trial.id, "attempt": 1, "iterations_done": 4}]}
    assert api.post(f"/workers/{worker}/heartbeats", beat)["stop"] == []
    assert api.get(f"/trials/{trial.id}")["iterations_done"] == 4
    api.post("/campaigns/first/cancel")
    assert api.post(f"/workers/{worker}/heartbeats", beat)["stop"] == [trial.id]


def test_a_session_that_has_ended_or_never_was_is_a_404(api: Api, http: TestClient) -> None:
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
    trial = api.store.add_trial(campaign_id, LAYOUT)
    api.lease(worker)
    assert http.delete(f"/v1/workers/{worker}").status_code == 204
    assert api.get(f"/trials/{trial.id}")["state"] == "PENDING"
    assert api.get("/workers")["workers"] == []


def test_an_outcome_is_taken_once_however_often_it_is_posted(api: Api, campaign_id: int) -> None:
    worker = api.register()
    trial = api.store.add_trial(campaign_id, LAYOUT)
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


def test_an_outcome_is_taken_from_a_later_session_of_the_worker(api: Api, campaign_id: int) -> None:
    before = api.register("w1")
    api.store.add_trial(campaign_id, LAYOUT)
    lease = api.lease(before)
    now = api.register("w1")
    assert api.report(now, lease, completed(LAYOUT))["state"] == "COMPLETED"


def test_a_failure_is_kept_with_its_reason_node_and_log(api: Api, campaign_id: int) -> None:
    worker = api.register()
    trial = api.store.add_trial(campaign_id, LAYOUT)
    api.report(worker, api.lease(worker), failed("out_of_memory"))
    read = api.get(f"/trials/{trial.id}")
    assert (read["state"], read["reason"], read["node"]) == (
        "INFEASIBLE",
        "out_of_memory",
        "node-1",
    )
    assert read["log_tail"] == "Traceback ..."
    assert read["iterations"] == []


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"state": "failed"}, 422),
        ({"reason": "bad luck", "state": "failed", "measurement": None}, 422),
        ({"measurement": None}, 422),
        ({"measurement": {"step_time_s": 1}}, 422),
        ({"duration_s": -1}, 422),
        ({"duration_s": "long"}, 422),
        ({"duration_s": "3"}, 422),
        ({"duration_s": True}, 422),
        ({"log_tail": 3}, 422),
        ({"log_tail": "\ud800"}, 422),
        ({"message": {"text": "x"}}, 422),
        ({"mood": "good"}, 422),
        ({"state": "cancelled", "reason": "crashed", "measurement": None}, 422),
        ({"state": "failed", "reason": "cancelled", "measurement": None}, 422),
    ],
)
def test_an_impossible_outcome_is_refused_and_the_trial_goes_on(
    api: Api, campaign_id: int, changes: dict[str, Any], status: int
) -> None:
    worker = api.register()
    trial = api.store.add_trial(campaign_id, LAYOUT)
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
    trial = api.store.add_trial(campaign_id, LAYOUT)
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
        ("/trials/{trial}/outcome", {"attempt": True}),
        ("/trials/{trial}/outcome", {"attempt": "1"}),
        ("/trials/{trial}/outcome", {"attempt": 1.0}),
        ("/workers/{worker}/leases", {"wait_s": "0"}),
        ("/workers/{worker}/leases", {"wait_s": 0, "max_trials": True}),
        (
            "/workers/{worker}/heartbeats",
            {"trials": [{"trial_id": "1", "attempt": 1, "iterations_done": 0}]},
        ),
    ],
)
def test_nothing_that_a_worker_sends_is_repaired(
    api: Api, campaign_id: int, path: str, body: dict[str, Any]
) -> None:
    worker = api.register()
    trial = api.store.add_trial(campaign_id, LAYOUT)
    if "outcome" in path:
        api.lease(worker)
        body = {**outcome_body(worker), **body}
    problem = api.post(path.format(trial=trial.id, worker=worker), body, status=422)
    assert len(problem["errors"]) == 1


def test_the_description_shows_what_an_outcome_looks_like(http: TestClient) -> None:
    schemas = http.get("/openapi.json").json()["components"]["schemas"]
    assert schemas["OutcomePost"]["properties"]["outcome"]["$ref"].endswith("/Outcome")
    assert set(schemas["Outcome"]["properties"]) == {f.name for f in dataclasses.fields(Outcome)}


def test_a_measurement_that_is_not_finite_is_refused(
    api: Api, http: TestClient, campaign_id: int
) -> None:
    worker = api.register()
    trial = api.store.add_trial(campaign_id, LAYOUT)
    api.lease(worker)
    body = outcome_body(worker)
    body["outcome"]["measurement"]["mfu"] = math.nan
    answer = http.post(
        f"/v1/trials/{trial.id}/outcome",
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 422, answer.text
    assert "mfu" in answer.json()["detail"]


def test_an_attempt_that_never_was_is_a_conflict(api: Api, campaign_id: int) -> None:
    worker = api.register()
    trial = api.store.add_trial(campaign_id, LAYOUT)
    api.lease(worker)
    body = outcome_body(worker, attempt=5)
    problem = api.post(f"/trials/{trial.id}/outcome", body, status=409)
    assert "no attempt 5" in problem["detail"]
    api.post("/trials/999/outcome", body, status=404)
    api.post(f"/trials/{'9' * 30}/outcome", body, status=422)
    api.post("/trials/0/outcome", body, status=422)

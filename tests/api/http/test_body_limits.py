"""Bodies are as large as their route needs, and a hostile one costs little."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple

import pytest
import yaml
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient

from api.app import create_app
from api.http import body_limits, request_bodies
from api.http.body_limits import BODY_LIMITS, limits_of
from api.settings import Settings
from results_db.store import Store
from search_spaces.protocol.measurement import MAX_MEASURED_ITERATIONS
from search_spaces.protocol.outcome import MAX_LOG_LENGTH
from search_spaces.protocol.worker_messages import MAX_NODES
from tests.kit.api import INTRODUCTION, TOKEN, Api
from tests.kit.bodies import OUTCOME
from tests.kit.waiting import wait_until

JSON = {"Content-Type": "application/json"}
YAML = {"Content-Type": "application/yaml"}


def test_the_limits_are_of_routes_that_take_a_body() -> None:
    with closing(Store("sqlite:////never/opened")) as store:
        app = create_app(Settings(token=TOKEN), store)
    assert BODY_LIMITS.keys() <= {
        str(route.name)
        for route in iter_route_contexts(app.routes)
        if {"POST", "PUT", "PATCH"} & set(route.methods or ())
    }


def unknown_fields(number: int) -> dict[str, int]:
    return {f"f{i:x}": 1 for i in range(number)}


def test_fields_and_values_are_counted_before_they_are_made(api: Api, http: TestClient) -> None:
    api.submit()
    answer = http.patch("/v1/campaigns/first", json=unknown_fields(340_000))
    assert answer.status_code == 413
    answer = http.patch("/v1/campaigns/first", json=unknown_fields(2000))
    assert answer.status_code == 422
    assert "more than 1000" in answer.json()["detail"]
    for value in ("[]", "1", '{"a":1}', '"a,["'):
        for number, status in ((900, "request-invalid"), (1100, "document-invalid")):
            body = f'{{"notes": [{",".join([value] * (number // (1 + (value[0] in "[{"))))}]}}'
            answer = http.patch("/v1/campaigns/first", content=body, headers=JSON)
            assert answer.status_code == 422
            assert answer.json()["type"].endswith(status), answer.text
    notes = ',[{"\\' * 2000
    answer = http.patch("/v1/campaigns/first", json={"notes": notes})
    assert answer.status_code == 200
    assert answer.json()["notes"] == notes


@pytest.mark.parametrize("headers", [JSON, YAML], ids=["json", "yaml"])
@pytest.mark.parametrize(
    "body", ["[" + "[],[1]," * 30_000 + "1]", json.dumps(unknown_fields(1500))]
)
def test_documents_have_a_bounded_number_of_values_and_fields(
    http: TestClient, headers: dict[str, str], body: str
) -> None:
    for method, path in (("POST", "/v1/campaigns"), ("POST", "/v1/plans"), ("PUT", "/v1/models/m")):
        answer = http.request(method, path, content=body, headers=headers)
        assert answer.status_code == 422
        assert answer.json()["type"].endswith("document-invalid"), answer.text


def test_one_wrong_node_of_thousands_is_named_alone(api: Api, http: TestClient) -> None:
    worker = http.post("/v1/workers", json=INTRODUCTION).json()["worker_id"]
    nodes = [{"name": f"n{i}", "nothing": 1} for i in range(MAX_NODES)]
    beat = {"trials": [], "status": {"nodes": nodes}}
    answer = http.post(f"/v1/workers/{worker}/heartbeats", json=beat)
    assert answer.status_code == 422
    assert {error["field"].split(".")[3] for error in answer.json()["errors"]} == {"0"}


def test_the_largest_messages_of_workers_are_accepted(api: Api, http: TestClient) -> None:
    names = [f"rack-{i:06}.frontier.example.org" for i in range(MAX_NODES)]
    nodes = [{"name": name, "num_devices": 8} for name in names]
    introduction = {**INTRODUCTION, "num_nodes": MAX_NODES, "nodes": nodes}
    worker = http.post("/v1/workers", json=introduction).json()["worker_id"]
    health = {f"figure_{i}": 1.25 * i for i in range(10)}
    statuses = [{"name": name, "state": "idle", "health": health} for name in names]
    beat = http.post(f"/v1/workers/{worker}/heartbeats", json={"status": {"nodes": statuses}})
    assert beat.status_code == 200, beat.text

    iteration = {**OUTCOME["measurement"]["iterations"][0], "step_time_s": 0.12345678901234567}
    iterations = [{**iteration, "index": i} for i in range(MAX_MEASURED_ITERATIONS)]
    log = "\N{GRINNING FACE}" * MAX_LOG_LENGTH
    measurement = {**OUTCOME["measurement"], "iterations": iterations}
    outcome = {**OUTCOME, "log_tail": log, "measurement": measurement}
    body = json.dumps({"worker_id": "w", "attempt": 1, "outcome": outcome}).encode()
    most = limits_of("post_outcome")
    assert len(body) < most.num_bytes
    assert isinstance(
        request_bodies.read_json_request(body, most.num_values)["outcome"]["log_tail"], str
    )


def test_long_forms_are_read_whole(api: Api, http: TestClient) -> None:
    api.submit()
    notes = "\N{GRINNING FACE}" * 9000
    answer = http.post(
        "/campaigns/first/change", data={"notes": notes, "trials": 9}, follow_redirects=False
    )
    assert answer.status_code == 303
    assert api.get("/campaigns/first")["notes"] == notes
    text = yaml.safe_dump({"name": "a", "notes": "x" * 100_000})
    page = http.post("/submit/check", data={"view": "yaml", "yaml": text})
    assert page.status_code == 200
    assert "unknown campaign field" in page.text


class HeldUp(NamedTuple):
    """A service whose readers of documents wait."""

    read: list[bytes]
    admitted: list[str]
    """Paths of the requests that were admitted to the turns of their tokens."""
    may_end: threading.Event


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldUp]:
    """The documents that the service reads, and the event for which some of them wait."""
    reading: list[bytes] = []
    admitted: list[str] = []
    read_body = body_limits._read

    async def note(scope: Any, *rest: Any) -> Any:
        admitted.append(scope["path"])
        return await read_body(scope, *rest)

    may_end, read_by = threading.Event(), request_bodies.reader_of

    def reader_of(content_type: str) -> Any:
        def read(body: bytes) -> Any:
            reading.append(body)
            assert b"hold" not in body or may_end.wait(30)
            return read_by(content_type)(body)  # type: ignore[misc]

        return read

    monkeypatch.setattr(request_bodies, "reader_of", reader_of)
    monkeypatch.setattr(body_limits, "_read", note)
    monkeypatch.setattr(body_limits, "MAX_WAITING", 3)
    yield HeldUp(reading, admitted, may_end)
    may_end.set()


def test_a_flood_of_one_token_waits_for_itself_alone(http: TestClient, held_up: HeldUp) -> None:
    read, admitted, may_end = held_up
    made = http.post("/v1/tokens", json={"name": "flood", "role": "submitter"}).json()
    flood = {"Authorization": f"Bearer {made['token']}"}
    assert http.get("/v1/whoami", headers=flood).status_code == 200

    def ask() -> int:
        return http.post("/v1/plans", json={"name": "hold"}, headers=flood).status_code

    with ThreadPoolExecutor(3) as clients:
        try:
            answers = [clients.submit(ask) for _ in range(3)]
            wait_until("all wait", lambda: admitted.count("/v1/plans") == 3 and len(read) == 1)
            # Another token plans while the flood's first plan lasts; a fourth request of the flood
            # is one too many.
            assert http.post("/v1/plans", json={"name": "mine"}).status_code == 422
            refused = http.post("/v1/plans", json={}, headers=flood)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
            assert read == [b'{"name":"hold"}', b'{"name":"mine"}']
        finally:
            may_end.set()
        assert [answer.result() for answer in answers] == [422] * 3

"""Bodies are as large as their route needs; a hostile one, or many requests, delay nobody else."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import yaml
from fastapi.routing import iter_route_contexts
from fastapi.testclient import TestClient
from starlette.requests import Request

from layout_tuner.api.app import create_app
from layout_tuner.api.http import body_limits, request_bodies
from layout_tuner.api.http.body_limits import BODY_LIMITS, CHANGES_AT_ONCE, FairQueue, limits_of
from layout_tuner.api.http.rate_limit import (
    GUESSES_PER_S,
    GUESSES_PER_S_OF_ALL,
    GuessLimit,
    Throttle,
    network_of,
)
from layout_tuner.api.settings import Settings
from layout_tuner.documents.limits import text_problem
from layout_tuner.protocol.measurement import MAX_MEASURED_ITERATIONS
from layout_tuner.protocol.outcome import MAX_LOG_LENGTH
from layout_tuner.protocol.worker_messages import MAX_NODES
from layout_tuner.results_db.store import Store
from tests.kit.api import INTRODUCTION, TOKEN, Api, answered
from tests.kit.bodies import OUTCOME
from tests.kit.services import ServeProcess
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
    answered(http.patch("/v1/campaigns/first", json=unknown_fields(340_000)), 413)
    many = http.patch("/v1/campaigns/first", json=unknown_fields(2000))
    answered(many, 422, "more than 1000")
    for value in ("[]", "1", '{"a":1}', '"a,["'):
        for number, status in ((900, "request-invalid"), (1100, "document-invalid")):
            body = f'{{"notes": [{",".join([value] * (number // (1 + (value[0] in "[{"))))}]}}'
            answer = answered(http.patch("/v1/campaigns/first", content=body, headers=JSON), 422)
            assert answer.json()["type"].endswith(status), answer.text
    notes = ',[{"\\' * 2000
    answer = answered(http.patch("/v1/campaigns/first", json={"notes": notes}), 200)
    assert answer.json()["notes"] == notes


@pytest.mark.parametrize("headers", [JSON, YAML], ids=["json", "yaml"])
@pytest.mark.parametrize(
    "body", ["[" + "[],[1]," * 30_000 + "1]", json.dumps(unknown_fields(1500))]
)
def test_documents_have_a_bounded_number_of_values_and_fields(
    http: TestClient, headers: dict[str, str], body: str
) -> None:
    for method, path in (("POST", "/v1/campaigns"), ("POST", "/v1/plans"), ("PUT", "/v1/models/m")):
        answer = answered(http.request(method, path, content=body, headers=headers), 422)
        assert answer.json()["type"].endswith("document-invalid"), answer.text


def test_one_wrong_node_of_thousands_is_named_alone(api: Api) -> None:
    nodes = [{"name": f"n{i}", "nothing": 1} for i in range(MAX_NODES)]
    beat = {"trials": [], "status": {"nodes": nodes}}
    answer = api.post(f"/workers/{api.register()}/heartbeats", beat, status=422)
    assert {error["field"].split(".")[3] for error in answer["errors"]} == {"0"}


def test_the_largest_messages_of_workers_are_accepted(api: Api) -> None:
    names = [f"rack-{i:06}.frontier.example.org" for i in range(MAX_NODES)]
    nodes = [{"name": name, "num_devices": 8} for name in names]
    introduction = {**INTRODUCTION, "num_nodes": MAX_NODES, "nodes": nodes}
    worker = api.post("/workers", introduction, status=201)["worker_id"]
    health = {f"figure_{i}": 1.25 * i for i in range(10)}
    statuses = [{"name": name, "state": "idle", "health": health} for name in names]
    api.post(f"/workers/{worker}/heartbeats", {"status": {"nodes": statuses}})

    iteration = {**OUTCOME["measurement"]["iterations"][0], "step_time_s": 0.12345678901234567}
    iterations = [{**iteration, "index": i} for i in range(MAX_MEASURED_ITERATIONS)]
    log = "\N{GRINNING FACE}" * MAX_LOG_LENGTH
    measurement = {**OUTCOME["measurement"], "iterations": iterations}
    outcome = {**OUTCOME, "log_tail": log, "measurement": measurement}
    body = json.dumps({"worker_id": "w", "attempt": 1, "outcome": outcome}).encode()
    most = limits_of("post_outcome")
    assert len(body) < most.num_bytes
    read = request_bodies.read_json(body, most.num_values, text_rule=text_problem)
    assert read["outcome"]["log_tail"] == log


def test_long_forms_are_read_whole(api: Api, http: TestClient) -> None:
    api.submit()
    notes = "\N{GRINNING FACE}" * 9000
    form = {"notes": notes, "trials": 9}
    answered(http.post("/campaigns/first/change", data=form, follow_redirects=False), 303)
    assert api.get("/campaigns/first")["notes"] == notes
    text = yaml.safe_dump({"name": "a", "notes": "x" * 100_000})
    checked = http.post("/submit/check", data={"view": "yaml", "yaml": text})
    answered(checked, 200, "unknown campaign field")


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
    flood = Api(http).holder("flood", "submitter")
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


async def _started(queue: FairQueue, tokens: Sequence[str]) -> tuple[list[str], int]:
    """The tokens in the order in which their work started, and most that worked at once."""
    started: list[str] = []
    working = most = 0

    async def work(token: str) -> None:
        nonlocal working, most
        async with queue.turn(token):
            started.append(token)
            working += 1
            most = max(most, working)
            for _ in range(10):
                await asyncio.sleep(0)
            working -= 1

    await asyncio.gather(*(work(token) for token in tokens))
    return started, most


def test_tokens_work_in_turns_at_most_so_many_at_once_and_not_two_works_of_one() -> None:
    started, most = asyncio.run(_started(FairQueue(at_once=1), "aaaabcb"))
    assert (started, most) == (list("abcabaa"), 1)

    started, most = asyncio.run(_started(FairQueue(at_once=2), "aaaa"))
    assert (started, most) == (list("aaaa"), 1)
    started, most = asyncio.run(_started(FairQueue(at_once=2), "aaaabbcc"))
    assert (started[:4], most) == (list("abca"), 2)


def test_cancelled_work_gives_its_turn_to_others() -> None:
    async def cancelled_in_each_state() -> list[str]:
        queue = FairQueue(at_once=1)
        tasks = [asyncio.create_task(_started(queue, token)) for token in "abc"]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for task in tasks[:2]:  # one works, one waits
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        started, _ = await asyncio.wait_for(_started(queue, "ab"), 20)
        return [*(await tasks[2])[0], *started]

    assert asyncio.run(cancelled_in_each_state()) == ["c", "a", "b"]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[weakref.WeakSet[Request]]:
    """The requests of the test that are still in memory; no collector looks for them."""
    alive: weakref.WeakSet[Request] = weakref.WeakSet()
    begin = Request.__init__

    def note_and_begin(self: Request, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        alive.add(self)

    monkeypatch.setattr(Request, "__init__", note_and_begin)
    gc.disable()
    yield alive
    gc.enable()


def test_a_refused_request_is_forgotten_at_once(
    http: TestClient, requests: weakref.WeakSet[Request]
) -> None:
    for method, path, content, kind, status in (
        ("POST", "/v1/workers", b'{"name": [', "application/json", 400),
        ("POST", "/v1/workers", b"x" * (5 << 20), "application/json", 413),
        ("POST", "/v1/campaigns", b"a: [", "application/yaml", 400),
        ("POST", "/v1/campaigns", b'{"name": "a"}', "application/json", 422),
        ("POST", "/v1/campaigns/import", b"a,b\n1,2\n", "text/csv", 422),
        ("GET", "/v1/campaigns/nothing", b"", "application/json", 404),
    ):
        for _ in range(20):
            headers = {"Content-Type": kind}
            answered(http.request(method, path, content=content, headers=headers), status)
        # One may still be on its way out of a thread of the service.
        assert len(requests) <= 1, path


def test_few_documents_are_read_at_once_and_one_of_each_token(
    http: TestClient, held_up: HeldUp
) -> None:
    """Each takes 150 times its size while it is read."""
    holders = []
    for number in range(CHANGES_AT_ONCE + 1):
        holders.append(Api(http).holder(f"t{number}", "submitter"))
        http.get("/v1/whoami", headers=holders[-1])

    def ask(number: int) -> int:
        body = {"name": f"hold-{number}"}
        return http.post("/v1/campaigns", json=body, headers=holders[number]).status_code

    asked = [number for number in range(len(holders)) for _ in range(3)]
    with ThreadPoolExecutor(len(asked)) as clients:
        answers = [clients.submit(ask, number) for number in asked]
        wait_until("all wait", lambda: held_up.admitted.count("/v1/campaigns") == len(asked))
        for _ in range(5):  # whatever could go on has gone on
            assert http.get("/v1/health").status_code == 200
        at_work = [*held_up.read]
        held_up.may_end.set()
        assert {answer.result() for answer in answers} == {422}
    assert len(set(at_work)) == len(at_work) == CHANGES_AT_ONCE


@pytest.mark.slow
def test_bodies_of_refused_requests_are_not_kept(service: ServeProcess) -> None:
    num_bodies, num_bytes = 40, (4 << 20) - 1
    body = b'["' + b"x" * (num_bytes - 3) + b"]"

    def ask(_number: int) -> int:
        headers = {**service.headers, **JSON}
        url = f"{service.url}/v1/workers"
        return httpx.post(url, content=body, headers=headers, timeout=60).status_code

    with ThreadPoolExecutor(4) as clients:
        assert set(clients.map(ask, range(8))) == {400}
        process = psutil.Process(service.service["pid"])
        before = process.memory_info().rss
        assert set(clients.map(ask, range(num_bodies))) == {400}
        # Each body and its text used to be kept until the next full collection. A quarter of the
        # bodies is more than the four that are in progress, with their texts.
        assert process.memory_info().rss - before < num_bodies * num_bytes // 4


class Ticks:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_after_a_burst_a_permit_comes_at_the_steady_rate_and_being_refused_costs_nothing() -> None:
    clock = Ticks()
    throttle = Throttle(per_s=2.0, burst=3.0, clock=clock)
    assert [throttle.take("a") for _ in range(3)] == [0, 0, 0]
    assert throttle.take("a") == pytest.approx(0.5)
    clock.now += 0.25
    assert throttle.take("a") == pytest.approx(0.25)
    clock.now += 0.25
    assert throttle.take("a") == 0
    assert throttle.take("a") > 0

    clock = Ticks()
    throttle = Throttle(per_s=1.0, burst=2.0, clock=clock)
    assert [throttle.take("a") > 0 for _ in range(5)] == [False, False, True, True, True]
    clock.now += 1000
    assert [throttle.take("a") > 0 for _ in range(3)] == [False, False, True]


def test_keys_do_not_share_and_no_more_of_them_than_allowed_are_remembered() -> None:
    throttle = Throttle(per_s=1.0, burst=1.0, clock=Ticks())
    assert throttle.take("a") == 0
    assert throttle.take("b") == 0
    throttle.give_back("a")
    assert throttle.take("a") == 0
    assert throttle.take("b") > 0

    throttle = Throttle(per_s=1.0, burst=1.0, max_keys=2, clock=Ticks())
    for key in "abc":
        assert throttle.take(key) == 0
    assert throttle.take("a") == 0  # forgotten, and begins anew
    assert throttle.take("c") > 0


def test_in_an_hour_an_address_guesses_some_hundred_times() -> None:
    clock = Ticks()
    limit = GuessLimit(10, clock=clock)
    looked_up = 0
    for _ in range(36_000):
        looked_up += limit.begin("192.0.2.1") == 0
        clock.now += 0.1
    assert looked_up == pytest.approx(10 + 3600 * GUESSES_PER_S, abs=2)


def test_many_addresses_together_are_slowed_too() -> None:
    limit = GuessLimit(10, clock=Ticks())
    waits = [limit.begin(f"198.51.{number // 250}.{number % 250}") for number in range(999)]
    assert sum(wait_s == 0 for wait_s in waits) == 200
    assert max(waits) <= 1 / GUESSES_PER_S_OF_ALL + 1e-9


def test_a_network_of_one_host_counts_as_one_address() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") == "2001:db8::/64"
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") == "192.0.2.1"
    assert network_of("testclient") == "testclient"


def test_the_log_says_so_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Ticks()
    limit = GuessLimit(1, clock=clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            limit.begin("192.0.2.1")
        assert len(caplog.messages) == 1
        clock.now += 61
        for _ in range(15):
            limit.begin("192.0.2.1")
    assert len(caplog.messages) == 2
    assert "192.0.2.1 sends wrong sign-in codes" in caplog.text

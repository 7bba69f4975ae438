"""Refused requests free their bodies at once: none of them waits for the garbage collector."""

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.requests import Request

from api.http import request_bodies
from api.http.body_limits import CHANGES_AT_ONCE
from tests.kit.services import ServeProcess
from tests.kit.waiting import wait_until

NUM_REQUESTS = 20
NUM_BODIES = 40
BODY_BYTES = (4 << 20) - 1

JSON = "application/json"


@contextmanager
def nothing_collected() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Request]:
    """The requests of the test that are still in memory."""
    alive: weakref.WeakSet[Request] = weakref.WeakSet()
    begin = Request.__init__

    def note_and_begin(self: Request, *arguments: Any, **named: Any) -> None:
        begin(self, *arguments, **named)
        alive.add(self)

    monkeypatch.setattr(Request, "__init__", note_and_begin)
    return alive


@pytest.mark.parametrize(
    ("method", "path", "content", "kind", "status"),
    [
        ("POST", "/v1/workers", b'{"name": [', JSON, 400),
        ("POST", "/v1/workers", b"x" * (5 << 20), JSON, 413),
        ("POST", "/v1/campaigns", b"a: [", "application/yaml", 400),
        ("POST", "/v1/campaigns", b'{"name": "a"}', JSON, 422),
        ("POST", "/v1/campaigns/import", b"a,b\n1,2\n", "text/csv", 422),
        ("GET", "/v1/campaigns/nothing", b"", JSON, 404),
    ],
)
def test_a_refused_request_is_forgotten_at_once(
    http: TestClient,
    requests: weakref.WeakSet[Request],
    method: str,
    path: str,
    content: bytes,
    kind: str,
    status: int,
) -> None:
    def ask() -> int:
        headers = {"Content-Type": kind}
        return http.request(method, path, content=content, headers=headers).status_code

    with nothing_collected():
        assert [ask() for _ in range(NUM_REQUESTS)] == [status] * NUM_REQUESTS
        # One may still be on its way out of a thread of the service.
        assert len(requests) <= 1


def test_few_documents_are_read_at_once_and_one_of_each_token(
    http: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes 150 times its size while it is read."""
    reading: list[bytes] = []
    may_end, read_by = threading.Event(), request_bodies.reader_of

    def held_up(content_type: str) -> object:
        read = read_by(content_type)
        assert read is not None

        def reading_it(body: bytes) -> object:
            reading.append(body)
            assert may_end.wait(30)
            return read(body)

        return reading_it

    monkeypatch.setattr(request_bodies, "reader_of", held_up)
    num_tokens, each = CHANGES_AT_ONCE + 1, 4
    tokens = [
        http.post("/v1/tokens", json={"name": f"t{i}", "role": "submitter"}).json()["token"]
        for i in range(num_tokens)
    ]
    for token in tokens:
        http.get("/v1/whoami", headers={"Authorization": f"Bearer {token}"})
    app = http.app
    assert isinstance(app, FastAPI)

    def ask(token: str) -> int:
        body = {"name": token}
        headers = {"Authorization": f"Bearer {token}"}
        return http.post("/v1/campaigns", json=body, headers=headers).status_code

    num_requests = num_tokens * each
    with ThreadPoolExecutor(num_requests) as clients:
        answers = [clients.submit(ask, token) for token in tokens for _ in range(each)]
        in_flight = app.state.metrics.in_flight
        wait_until("all have come", lambda: in_flight._value.get() == num_requests)
        for _ in range(5):  # whatever could go on has gone on
            assert http.get("/v1/health").status_code == 200
        at_work = [*reading]
        may_end.set()
        assert {answer.result() for answer in answers} == {422}
    assert len(set(at_work)) == len(at_work) == CHANGES_AT_ONCE


@pytest.mark.slow
def test_bodies_of_refused_requests_are_not_kept(tmp_path: Path) -> None:
    service = ServeProcess(tmp_path / "data")
    body = b'["' + b"x" * (BODY_BYTES - 3) + b"]"

    def ask(_number: int) -> int:
        headers = {**service.http.headers, "Content-Type": JSON}
        url = f"{service.service['url']}/v1/workers"
        return httpx.post(url, content=body, headers=headers, timeout=60).status_code

    try:
        with ThreadPoolExecutor(4) as clients:
            assert set(clients.map(ask, range(8))) == {400}
            before = _resident_bytes(service)
            assert set(clients.map(ask, range(NUM_BODIES))) == {400}
            # Each body and its text used to be kept until the next full collection. A quarter of
            # the bodies is more than the four that are in progress, with their texts.
            assert _resident_bytes(service) - before < NUM_BODIES * BODY_BYTES // 4
    finally:
        service.end()


def _resident_bytes(service: ServeProcess) -> int:
    assert service.process is not None
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS")]
    return int(line.split()[1]) << 10

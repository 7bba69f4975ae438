"""Many clients change the same named things at once, through two services on one database."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from threading import Barrier
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from api.app import create_app
from api.settings import Settings
from results_db.store import Store
from tests.kit.api import CAMPAIGN, CLUSTER, HEADERS, TOKEN

AT_ONCE = 16
MODEL = {"preset": "tiny", "num_layers": 2}


@pytest.fixture
def clients(database_url: str) -> Iterator[list[TestClient]]:
    """Two services on one PostgreSQL; a SQLite has one."""
    with ExitStack() as stack:
        clients = []
        for _ in range(2 if database_url.startswith("postgresql") else 1):
            store = stack.enter_context(closing(Store(database_url)))
            app = create_app(Settings(token=TOKEN, lease_poll_s=0.02), store)
            client = TestClient(app, headers=HEADERS, raise_server_exceptions=False)
            clients.append(stack.enter_context(client))
        yield clients


def at_once(
    clients: list[TestClient], *requests: tuple[str, Any]
) -> list[tuple[str, httpx.Response]]:
    """Each request from a thread of its own, spread over the services; with what was asked."""
    together = Barrier(len(requests))

    def ask(client: TestClient, request: str, body: Any) -> tuple[str, httpx.Response]:
        method, path = request.split()
        together.wait(30)
        return request, client.request(method, f"/v1{path}", json=body)

    with ThreadPoolExecutor(len(requests)) as threads:
        spread = zip(itertools.cycle(clients), requests)
        asked = [threads.submit(ask, client, *request) for client, request in spread]
        return [each.result() for each in asked]


def submit(client: TestClient) -> None:
    assert client.post("/v1/campaigns", json=CAMPAIGN).status_code == 201


def test_unnamed_clones_that_are_made_at_once_all_get_names(clients: list[TestClient]) -> None:
    submit(clients[0])
    answers = at_once(clients, *[("POST /campaigns/first/clone", {})] * AT_ONCE)
    assert [answer.status_code for _, answer in answers] == [201] * AT_ONCE
    made = [answer.json() for _, answer in answers]
    names = {campaign["name"] for campaign in made}
    assert names == {f"first-{number}" for number in range(2, AT_ONCE + 2)}
    assert all(campaign["spec"]["name"] == campaign["name"] for campaign in made)


def test_unnamed_clones_of_one_request_that_is_sent_many_times_at_once_are_one(
    clients: list[TestClient],
) -> None:
    submit(clients[0])
    together = Barrier(AT_ONCE)

    def clone(client: TestClient) -> tuple[int, str]:
        together.wait(30)
        headers = {"Idempotency-Key": "the-same"}
        answer = client.post("/v1/campaigns/first/clone", json={}, headers=headers)
        return answer.status_code, answer.json().get("name", answer.text)

    with ThreadPoolExecutor(AT_ONCE) as threads:
        spread = itertools.islice(itertools.cycle(clients), AT_ONCE)
        answers = set(threads.map(clone, spread))
    assert answers == {(201, "first-2")}


CHANGES: dict[str, tuple[list[tuple[str, Any]], set[int]]] = {
    "models": (
        [("PUT /models/mine", MODEL), ("DELETE /models/mine", None), ("GET /models/mine", None)],
        {200, 201, 204, 404},
    ),
    "clusters": (
        [
            ("PUT /clusters/mine", {**CLUSTER, "name": "mine"}),
            ("DELETE /clusters/mine", None),
            ("GET /clusters", None),
        ],
        {200, 201, 204, 404},
    ),
    "tokens": (
        [
            ("POST /tokens", {"name": "bot", "role": "viewer"}),
            ("DELETE /tokens/1", None),
            ("GET /tokens", None),
        ],
        {200, 201, 204, 404, 409},
    ),
    "campaigns": (
        [
            ("POST /campaigns/first/pause", None),
            ("POST /campaigns/first/resume", None),
            ("PATCH /campaigns/first", {"notes": "busy"}),
            ("POST /campaigns/first/cancel", None),
        ],
        {200, 409},
    ),
    "ends": (
        [
            ("POST /campaigns/first/cancel", None),
            ("DELETE /campaigns/first", None),
            ("GET /campaigns/first", None),
            ("POST /campaigns/first/clone", {}),
        ],
        {200, 201, 204, 404, 409},
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", CHANGES)
def test_changes_by_one_name_at_once_are_done_or_refused_for_a_reason(
    clients: list[TestClient], what: str
) -> None:
    submit(clients[0])
    requests, allowed = CHANGES[what]
    for _ in range(3):
        answers = at_once(clients, *itertools.islice(itertools.cycle(requests), AT_ONCE))
        wrong = [
            (asked, a.status_code, a.text) for asked, a in answers if a.status_code not in allowed
        ]
        assert wrong == []

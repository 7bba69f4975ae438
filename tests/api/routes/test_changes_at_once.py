"""Many clients change the same named things at once, through two services on one database."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from layout_tuner.api.app import create_app
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.store import Store
from tests.kit.api import CAMPAIGN, HEADERS, TOKEN
from tests.kit.store import at_once

AT_ONCE = 16
MODEL = {"preset": "tiny", "num_layers": 2}
TOKEN_OF_BOT = {"name": "bot", "role": "viewer"}


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


def ask_at_once(
    clients: list[TestClient], requests: Iterable[tuple[str, Any]], **headers: str
) -> list[tuple[str, httpx.Response]]:
    """As many requests, from a thread each, spread over the services; with what was asked."""

    def ask(client: TestClient, request: str, body: Any) -> tuple[str, httpx.Response]:
        method, path = request.split()
        return request, client.request(method, f"/v1{path}", json=body, headers=headers)

    spread = zip(itertools.cycle(clients), itertools.cycle(requests))
    calls = [partial(ask, client, *asked) for client, asked in itertools.islice(spread, AT_ONCE)]
    return at_once(*calls)


def submit(client: TestClient) -> None:
    assert client.post("/v1/campaigns", json=CAMPAIGN).status_code == 201


def test_clones_made_at_the_same_time_get_names_of_their_own_and_a_repeated_request_makes_one(
    clients: list[TestClient],
) -> None:
    submit(clients[0])
    clone = ("POST /campaigns/first/clone", {})
    answers = ask_at_once(clients, [clone], **{"Idempotency-Key": "the-same"})
    found = {(answer.status_code, answer.json().get("name", answer.text)) for _, answer in answers}
    assert found == {(201, "first-2")}
    answers = ask_at_once(clients, [clone])
    assert [answer.status_code for _, answer in answers] == [201] * AT_ONCE
    made = [answer.json() for _, answer in answers]
    names = {campaign["name"] for campaign in made}
    assert names == {f"first-{number}" for number in range(3, AT_ONCE + 3)}
    assert all(campaign["spec"]["name"] == campaign["name"] for campaign in made)


CHANGES: dict[str, tuple[list[tuple[str, Any]], set[int]]] = {
    "models": (
        [("PUT /models/mine", MODEL), ("DELETE /models/mine", None), ("GET /models/mine", None)],
        {200, 201, 204, 404},
    ),
    "tokens": (
        [("POST /tokens", TOKEN_OF_BOT), ("DELETE /tokens/1", None), ("GET /tokens", None)],
        {200, 201, 204, 404, 409},
    ),
    "campaigns": (
        [
            *((f"POST /campaigns/first/{change}", None) for change in ("pause", "resume")),
            ("PATCH /campaigns/first", {"notes": "busy"}),
            ("POST /campaigns/first/cancel", None),
        ],
        {200, 409},
    ),
    "ends": (
        [
            *(("POST /campaigns/first/cancel", None), ("DELETE /campaigns/first", None)),
            *(("GET /campaigns/first", None), ("POST /campaigns/first/clone", {})),
        ],
        {200, 201, 204, 404, 409},
    ),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", CHANGES)
def test_changes_of_one_thing_at_the_same_time_are_done_or_refused_for_a_reason(
    clients: list[TestClient], what: str
) -> None:
    submit(clients[0])
    requests, allowed = CHANGES[what]
    for _ in range(2):
        answers = ask_at_once(clients, requests)
        wrong = [
            (asked, a.status_code, a.text) for asked, a in answers if a.status_code not in allowed
        ]
        assert wrong == []

"""Tokens and sessions: who holds them and until when, limits, and the audit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from layout_tuner.api.app import create_app
from layout_tuner.api.security.holders import (
    RENEWED_EVERY,
    Holder,
    SessionBook,
    TokenBook,
    local_holders,
    noting_uses,
)
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.access.browser_sessions import SESSION_IDLE_LIFE
from layout_tuner.results_db.access.tokens import hash_of_token
from layout_tuner.results_db.store import Store
from tests.kit.api import CAMPAIGN, HEADERS, TOKEN, Api, answered, bearer
from tests.kit.postgres import upgraded
from tests.kit.store import TurnableClock


def make(api: Api, name: str, role: str, **more: Any) -> dict[str, Any]:
    return api.post("/tokens", {"name": name, "role": role, **more}, status=201)


def test_a_token_works_and_is_shown_once(api: Api) -> None:
    made = make(api, "ci", "viewer")
    answer = api.http.get("/v1/whoami", headers=bearer(made["token"]))
    who = {"name": "ci", "role": "viewer", "owner": "ci", "groups": [], "expires_at": None}
    assert answer.json() == who
    (listed,) = api.get("/tokens")["tokens"]
    assert listed == {key: value for key, value in made.items() if key != "token"}
    assert listed["created_by"] == "local"
    assert listed["is_valid"]


def test_a_token_may_revoke_itself_and_opens_nothing_afterwards(api: Api) -> None:
    make(api, "ci", "viewer")
    made = make(api, "root", "admin")
    held = bearer(made["token"])
    assert api.http.get("/v1/tokens", headers=held).status_code == 200
    revoked = answered(api.http.delete(f"/v1/tokens/{made['id']}", headers=held), 200)
    assert not revoked.json()["is_valid"]
    answered(api.http.get("/v1/tokens", headers=held), 401, "unknown, expired or revoked")
    assert [token["name"] for token in api.get("/tokens")["tokens"]] == ["ci"]
    assert len(api.get("/tokens", revoked=True)["tokens"]) == 2


def test_a_token_opens_nothing_once_it_has_expired(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    made = make(api, "brief", "viewer", expires_at=soon.isoformat())
    assert api.http.get("/v1/whoami", headers=bearer(made["token"])).status_code == 200
    monkeypatch.setattr(Store, "now", lambda _store: soon)
    assert api.http.get("/v1/whoami", headers=bearer(made["token"])).status_code == 401


@pytest.fixture
def physics(api: Api) -> dict[str, Any]:
    """The token of a submitter who made and paused a campaign, which goes on."""
    made = make(api, "physics", "submitter")
    headers = bearer(made["token"])
    assert api.http.post("/v1/campaigns", json=CAMPAIGN, headers=headers).status_code == 201
    assert api.http.post("/v1/campaigns/first/pause", headers=headers).status_code == 200
    api.post("/campaigns/first/resume")
    return made


def test_the_audit_tells_who_did_what(api: Api, physics: dict[str, Any]) -> None:
    entries = api.get("/audit")["entries"]
    assert [(entry["actor"], entry["action"], entry["target"]) for entry in entries] == [
        ("local", "campaign.resume", "first"),
        ("physics", "campaign.pause", "first"),
        ("physics", "campaign.create", "first"),
        ("local", "token.create", "physics"),
    ]
    assert entries[1]["token_id"] == physics["id"]
    assert entries[1]["address"] == "testclient"


@pytest.mark.usefixtures("physics")
def test_the_audit_is_filtered_and_goes_on_page_by_page(api: Api) -> None:
    entries = api.get("/audit")["entries"]
    first = api.get("/audit", limit=3)
    second = api.get("/audit", limit=3, cursor=first["next_cursor"])
    assert first["entries"] + second["entries"] == entries
    assert second["next_cursor"] is None
    assert api.get("/audit", actor="physics", limit=1)["entries"] == [entries[1]]
    assert api.get("/audit", target="first", since=entries[0]["at"])["entries"] == [entries[0]]
    assert api.get("/audit", action="token.revoke")["entries"] == []
    assert "cursor" in api.get("/audit", status=400, cursor="x")["detail"]


def test_when_a_token_was_used_last_is_kept_as_the_service_ends(store: Store) -> None:
    _, token = store.access.create_token("ci", "viewer")
    with TestClient(create_app(Settings(token=TOKEN), store)) as http:
        assert http.get("/v1/whoami", headers=bearer(token)).status_code == 200
    assert store.access.tokens()[0].last_used_at is not None


def test_a_token_that_asks_too_often_is_told_when_to_come_again(store: Store) -> None:
    settings = Settings(token=TOKEN, requests_per_s=0.5)
    with TestClient(create_app(settings, store), headers=HEADERS) as http:
        slow = Api(http)
        held, other = (slow.holder(name, "viewer") for name in ("ci", "other"))
        statuses = [http.get("/v1/whoami", headers=held).status_code for _ in range(2)]
        assert statuses == [200, 429]
        refused = http.get("/v1/whoami", headers=held)
        assert 1 <= int(refused.headers["Retry-After"]) <= 3
        assert refused.json()["type"].endswith(":too-many-requests")
        assert "'ci' asks too often" in refused.json()["detail"]
        # Others are not held up, nor is an admin by what a viewer may.
        assert http.get("/v1/whoami", headers=other).status_code == 200
        assert all(slow.get("/whoami") for _ in range(5))


def test_tokens_of_the_data_directory_need_no_database_and_each_use_is_reported_once(
    store: Store,
) -> None:
    def find(book: TokenBook, token: str) -> Holder | None:
        return asyncio.run(book.find(hash_of_token(token.encode())))

    nowhere: Any = None
    local = local_holders("lt_admin", "lt_worker")
    book = TokenBook(nowhere, local)
    assert find(book, "lt_admin") == Holder(name="local", owner="local", role="admin")
    assert find(book, "lt_worker") == Holder(
        name="local-worker", owner="local-worker", role="worker"
    )

    book = TokenBook(store, local)
    record, token = store.access.create_token("ci", "viewer")
    for used in (token, token, "lt_admin"):
        find(book, used)
    assert book.take_uses() == {record.id}
    assert book.take_uses() == set()


SOMEBODY = hash_of_token(b"lt_somebody")


@pytest.fixture
def clock() -> TurnableClock:
    return TurnableClock()


@pytest.fixture
def store(tmp_path: Path, clock: TurnableClock) -> Iterator[Store]:
    with closing(Store.open(upgraded(tmp_path), clock=clock)) as store:
        yield store


@pytest.fixture
def session(store: Store) -> str:
    """The hash of the secret of a new session."""
    return hash_of_token(store.sign_ins.create_session(SOMEBODY).encode())


def test_a_session_is_renewed_when_it_was_used_and_not_more_often_than_needed(
    store: Store, session: str, clock: TurnableClock
) -> None:
    session_book = SessionBook(store)
    asyncio.run(session_book.find(session))
    assert session_book.take_uses() == set()  # it has just begun
    clock.forward(RENEWED_EVERY.total_seconds() + 1)
    for _ in range(2):
        asyncio.run(session_book.find(session))
    assert session_book.take_uses() == {session}
    assert session_book.take_uses() == set()


def test_the_service_renews_used_sessions_in_the_background(
    store: Store, session: str, clock: TurnableClock
) -> None:
    session_book = SessionBook(store)
    unused = hash_of_token(store.sign_ins.create_session(SOMEBODY).encode())
    clock.forward(3600)

    async def serve() -> None:
        async with noting_uses(TokenBook(store, {}), session_book, store):
            assert await session_book.find(session) == SOMEBODY

    asyncio.run(serve())
    renewed, old = store.sign_ins.session_by_hash(session), store.sign_ins.session_by_hash(unused)
    assert renewed.expires_at == clock() + SESSION_IDLE_LIFE
    assert old.expires_at < renewed.expires_at

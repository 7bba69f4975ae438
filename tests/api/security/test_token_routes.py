"""Tokens, limits and the audit over HTTP."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api.app import create_app
from api.settings import Settings
from results_db.store import Store
from tests.kit.api import CAMPAIGN, TOKEN, Api


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def make(api: Api, name: str, role: str, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = api.post("/tokens", {"name": name, "role": role, **more}, status=201)
    return made


def test_a_token_is_shown_once_works_and_is_listed_without_itself(api: Api) -> None:
    made = make(api, "ci", "viewer")
    answer = api.http.get("/v1/whoami", headers=bearer(made["token"]))
    assert answer.json() == {"name": "ci", "role": "viewer", "expires_at": None}
    (listed,) = api.get("/tokens")["tokens"]
    assert listed == {key: value for key, value in made.items() if key != "token"}
    assert listed["created_by"] == "local"
    assert listed["is_valid"]


def test_a_revoked_token_opens_nothing_at_once(api: Api) -> None:
    made = make(api, "ci", "admin")
    held = bearer(made["token"])
    assert api.http.get("/v1/tokens", headers=held).status_code == 200
    # A token may revoke itself.
    revoked = api.http.delete(f"/v1/tokens/{made['id']}", headers=held)
    assert revoked.status_code == 200
    assert not revoked.json()["is_valid"]
    refused = api.http.get("/v1/tokens", headers=held)
    assert refused.status_code == 401
    assert "unknown, expired or revoked" in refused.json()["detail"]
    assert api.get("/tokens")["tokens"] == []
    assert [token["name"] for token in api.get("/tokens", revoked=True)["tokens"]] == ["ci"]


def test_an_expired_token_opens_nothing(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    soon = datetime.now(UTC) + timedelta(hours=1)
    made = make(api, "ci", "viewer", expires_at=soon.isoformat())
    assert api.http.get("/v1/whoami", headers=bearer(made["token"])).status_code == 200
    monkeypatch.setattr(Store, "now", lambda _store: soon)
    assert api.http.get("/v1/whoami", headers=bearer(made["token"])).status_code == 401


def test_the_audit_tells_who_did_what_and_goes_on_page_by_page(api: Api) -> None:
    physics = make(api, "physics", "submitter")
    headers = bearer(physics["token"])
    assert api.http.post("/v1/campaigns", json=CAMPAIGN, headers=headers).status_code == 201
    assert api.http.post("/v1/campaigns/first/pause", headers=headers).status_code == 200
    api.post("/campaigns/first/resume")
    entries = api.get("/audit")["entries"]
    assert [(entry["actor"], entry["action"], entry["target"]) for entry in entries] == [
        ("local", "campaign.resume", "first"),
        ("physics", "campaign.pause", "first"),
        ("physics", "campaign.create", "first"),
        ("local", "token.create", "physics"),
    ]
    assert entries[1]["token_id"] == physics["id"]
    assert entries[1]["address"] == "testclient"
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
    with TestClient(create_app(settings, store), headers=bearer(TOKEN)) as http:
        slow = Api(http)
        held = bearer(make(slow, "ci", "viewer")["token"])
        other = bearer(make(slow, "other", "viewer")["token"])
        statuses = [http.get("/v1/whoami", headers=held).status_code for _ in range(2)]
        assert statuses == [200, 429]
        refused = http.get("/v1/whoami", headers=held)
        assert 1 <= int(refused.headers["Retry-After"]) <= 3
        assert refused.json()["type"].endswith(":too-many-requests")
        assert "'ci' asks too often" in refused.json()["detail"]
        # Others are not held up, nor is an admin by what a viewer may.
        assert http.get("/v1/whoami", headers=other).status_code == 200
        assert all(slow.get("/whoami") for _ in range(5))

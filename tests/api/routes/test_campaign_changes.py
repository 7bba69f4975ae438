"""Campaigns after their submission: sent twice, found, changed, cloned, deleted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient

from search_spaces.spec.layout import Layout
from tests.kit.api import CAMPAIGN, Api

LAYOUT = Layout(num_microbatches=8)


def send(
    http: TestClient, key: str, path: str = "/v1/campaigns", body: Any = CAMPAIGN, **headers: str
) -> Any:
    return http.post(path, json=body, headers={"Idempotency-Key": key, **headers})


def names(api: Api, **query: Any) -> list[str]:
    return [campaign["name"] for campaign in api.get("/campaigns", **query)["campaigns"]]


def test_a_repeated_request_makes_one_campaign(http: TestClient, api: Api) -> None:
    first, again = send(http, "k"), send(http, "k")
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json()["id"] == again.json()["id"]
    assert again.headers["Location"] == "/v1/campaigns/first"
    assert again.headers["Idempotent-Replay"] == "true"
    assert "Idempotent-Replay" not in first.headers
    assert names(api) == ["first"]


def test_a_repeated_request_shows_the_current_campaign(http: TestClient, api: Api) -> None:
    send(http, "k")
    api.post("/campaigns/first/pause")
    assert send(http, "k").json()["state"] == "PAUSED"


def test_a_reused_idempotency_key_is_refused(http: TestClient, api: Api) -> None:
    send(http, "k")
    refused = send(http, "k", body={**CAMPAIGN, "name": "second"})
    assert refused.status_code == 422
    assert refused.json()["type"].endswith(":idempotency-key-reused")
    assert "'k' was sent with another request" in refused.json()["detail"]
    assert names(api) == ["first"]


def test_a_refused_request_may_be_sent_again(http: TestClient, api: Api) -> None:
    assert send(http, "k", body={**CAMPAIGN, "model": "gpt-0"}).status_code == 422
    assert send(http, "k").status_code == 201


@pytest.mark.parametrize("key", ["", "a b"])
def test_an_invalid_idempotency_key_is_refused(http: TestClient, key: str) -> None:
    refused = send(http, key)
    assert refused.status_code == 422
    assert "idempotency-key" in refused.json()["detail"]


@pytest.fixture
def several(api: Api) -> Api:
    api.submit(name="sweep-1")
    api.submit(name="Sweep-2", strategy="exhaustive")
    api.submit(name="both", objective=["tokens_per_s", "memory_headroom"])
    api.post("/campaigns/both/pause")
    return api


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, ["both", "Sweep-2", "sweep-1"]),
        ({"name_contains": "SWEEP"}, ["Sweep-2", "sweep-1"]),
        ({"strategy": "exhaustive"}, ["Sweep-2"]),
        ({"objective": "memory_headroom"}, ["both"]),
        ({"model": "tiny", "cluster": "local-cpu", "state": "PAUSED"}, ["both"]),
        ({"created_after": "2999-01-01T00:00:00+02:00"}, []),
        ({"created_by": "nobody"}, []),
    ],
    ids=str,
)
def test_campaigns_are_filtered_by(several: Api, query: dict[str, Any], found: list[str]) -> None:
    assert names(several, **query) == found


@pytest.mark.parametrize(
    "query",
    [{"strategy": "luck"}, {"model": "a\0b"}, {"created_after": "2026-01-01T00:00:00"}],
    ids=str,
)
def test_an_invalid_filter_is_refused_by_name(api: Api, query: dict[str, str]) -> None:
    assert next(iter(query)) in api.get("/campaigns", status=422, **query)["detail"]


def patch(api: Api, body: Any, status: int = 200, campaign: str = "first") -> Any:
    # In ASCII: half of a surrogate pair could not be sent otherwise.
    answer = api.http.patch(
        f"/v1/campaigns/{campaign}",
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == status, answer.text
    return answer.json()


def test_only_the_named_bounds_of_a_budget_change(api: Api) -> None:
    api.submit(budget={"trials": 3, "wall_time": "10m"})
    changed = patch(api, {"budget": {"trials": 4, "wall_time": "1h"}})
    assert changed["spec"]["budget"] == {"trials": 4, "node_hours": None, "wall_time_s": 3600.0}
    assert changed["progress"]["trials_planned"] == 4
    changed = patch(api, {"budget": {"wall_time_s": None}})
    assert changed["spec"]["budget"] == {"trials": 4, "node_hours": None, "wall_time_s": None}
    assert api.get("/campaigns/first")["spec"]["budget"] == changed["spec"]["budget"]


def test_notes_are_kept_as_they_are_written(api: Api) -> None:
    api.submit()
    notes = "<b>second</b> half\n\tneu: größer, 更快"
    assert patch(api, {"notes": notes})["notes"] == notes
    assert patch(api, {})["notes"] == notes
    assert patch(api, {"notes": ""})["notes"] == ""


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"budget": {"trials": 0}}, "budget.trials"),
        ({"notes": None}, "notes"),
        ({"notes": "\ud800"}, "notes: "),
        ({"seed": 3}, "seed"),
        ([], "body"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_invalid_change_is_refused_by_name(api: Api, body: Any, named: str) -> None:
    before = api.submit()
    assert named in patch(api, body, status=422)["detail"]
    after = api.get("/campaigns/first")
    assert (after["spec"], after["notes"]) == (before["spec"], "")


def test_the_budget_of_an_ended_campaign_cannot_change(api: Api) -> None:
    api.submit()
    api.post("/campaigns/first/cancel")
    refused = patch(api, {"budget": {"trials": 9}}, status=409)
    assert "is CANCELLED and is not reopened" in refused["detail"]
    assert "/v1/campaigns/first/clone" in refused["detail"]
    assert patch(api, {"notes": "it was too slow"})["notes"] == "it was too slow"
    clone = api.post("/campaigns/first/clone", {"budget": {"trials": 9}}, status=201)
    assert clone["spec"]["budget"]["trials"] == 9


def test_a_clone_has_the_named_changes_and_a_numbered_name(api: Api) -> None:
    original = api.submit()
    clone = api.post("/campaigns/first/clone", status=201)
    assert (clone["name"], clone["state"], clone["notes"]) == (
        "first-2",
        "RUNNING",
        "clone of first",
    )
    assert clone["spec"] == {**original["spec"], "name": "first-2"}
    assert api.post("/campaigns/first/clone", {"seed": 3}, status=201)["name"] == "first-3"
    named = api.post(
        "/campaigns/first/clone",
        {"name": "mine", "strategy": "exhaustive", "space": {"global_batch_size": 8, "dp": 1}},
        status=201,
    )
    assert (named["name"], named["strategy"], named["num_legal_layouts"]) == (
        "mine",
        "exhaustive",
        1,
    )


def test_a_clone_on_another_cluster_loses_the_warnings_of_the_first(api: Api) -> None:
    api.submit(cluster={"name": "guessed", "devices_per_node": 4})
    clone = api.post("/campaigns/first/clone", {"cluster": CAMPAIGN["cluster"]}, status=201)
    assert [warning for warning in clone["warnings"] if "guessed" in warning] == []
    (warning,) = api.post("/campaigns/first/clone", status=201)["warnings"]
    assert "guessed" in warning


def test_a_long_name_is_cut_for_the_clones_number(api: Api) -> None:
    api.submit(name="x" * 64)
    assert api.post(f"/campaigns/{'x' * 64}/clone", status=201)["name"] == "x" * 62 + "-2"


def test_a_clone_is_refused_as_a_campaign_is(api: Api) -> None:
    api.submit()
    for body, status, says in [
        ({"name": "first"}, 409, "exists already"),
        ({"budget": {}}, 422, "at least one bound"),
        ({"colour": "red"}, 422, "colour"),
        ([1], 422, "not a mapping"),
        ({"start_from": ["nothing"]}, 422, "no campaign named 'nothing'"),
    ]:
        assert says in api.post("/campaigns/first/clone", body, status=status)["detail"]
    assert names(api) == ["first"]


def test_a_repeated_clone_request_makes_one_clone(http: TestClient, api: Api) -> None:
    api.submit()
    path = "/v1/campaigns/first/clone"
    first, again = send(http, "k", path, {}), send(http, "k", path, {})
    assert first.json()["name"] == again.json()["name"] == "first-2"
    assert again.headers["Idempotent-Replay"] == "true"
    assert send(http, "k", path, {"seed": 1}).status_code == 422
    assert send(http, "k").status_code == 422


def test_a_clone_of_an_imported_campaign_runs(http: TestClient, api: Api) -> None:
    api.submit()
    figures = {"tokens_per_step": 1024, "tokens_per_s": 2000.0, "step_time_s": 0.512}
    api.complete(api.register(), "first", LAYOUT, **figures)
    table = http.get("/v1/campaigns/first/table").content
    imported = http.post(
        "/v1/campaigns/import?name=theirs", content=table, headers={"Content-Type": "text/csv"}
    )
    assert imported.status_code == 201, imported.text
    clone = api.post("/campaigns/theirs/clone", {"budget": {"trials": 1}}, status=201)
    assert (clone["state"], clone["strategy"]) == ("RUNNING", "exhaustive")


def delete(api: Api, status: int = 204, campaign: str = "first") -> Any:
    answer = api.http.delete(f"/v1/campaigns/{campaign}")
    assert answer.status_code == status, answer.text
    return answer.json() if answer.content else None


def test_a_deleted_campaign_is_gone_with_its_trials(api: Api) -> None:
    api.submit()
    trial = api.complete(api.register(), "first", LAYOUT)
    assert "cancel it before" in delete(api, 409)["detail"]
    api.post("/campaigns/first/cancel")
    assert delete(api) is None
    assert names(api) == []
    api.get(f"/trials/{trial}", status=404)
    delete(api, 404)
    assert api.submit()["name"] == "first"


def as_token(api: Api, name: str, role: str = "submitter") -> dict[str, str]:
    """The header of a new token in somebody's name."""
    token = api.post("/tokens", {"name": name, "role": role}, status=201)["token"]
    return {"Authorization": f"Bearer {token}"}


def test_two_senders_may_use_the_same_idempotency_key(http: TestClient, api: Api) -> None:
    physics, chemistry = as_token(api, "physics"), as_token(api, "chemistry")
    send(http, "k", **physics)
    other = send(http, "k", body={**CAMPAIGN, "name": "second"}, **chemistry)
    assert other.status_code == 201
    assert "Idempotent-Replay" not in other.headers

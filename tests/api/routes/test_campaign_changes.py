"""Campaigns after their submission: sent twice, found, changed, cloned, deleted."""

from __future__ import annotations

from typing import Any

from fastapi.testclient import TestClient

from search_spaces.spec.layout import Layout
from tests.kit.api import CAMPAIGN, Api
from tests.kit.campaigns import space_of

LAYOUT = Layout(num_microbatches=8)


def send(
    http: TestClient, key: str, path: str = "/v1/campaigns", body: Any = CAMPAIGN, **headers: str
) -> Any:
    return http.post(path, json=body, headers={"Idempotency-Key": key, **headers})


def names(api: Api, **query: Any) -> list[str]:
    return [campaign["name"] for campaign in api.get("/campaigns", **query)["campaigns"]]


def test_a_repeated_request_makes_one_campaign_and_shows_it_as_it_is(
    http: TestClient, api: Api
) -> None:
    first, again = send(http, "k"), send(http, "k")
    assert (first.status_code, again.status_code) == (201, 201)
    assert first.json()["id"] == again.json()["id"]
    assert again.headers["Location"] == "/v1/campaigns/first"
    assert again.headers["Idempotent-Replay"] == "true"
    assert "Idempotent-Replay" not in first.headers
    assert names(api) == ["first"]

    api.post("/campaigns/first/pause")
    assert send(http, "k").json()["state"] == "PAUSED"


def test_a_reused_or_invalid_idempotency_key_is_refused(http: TestClient, api: Api) -> None:
    assert send(http, "k", body={**CAMPAIGN, "model": "gpt-0"}).status_code == 422
    assert send(http, "k").status_code == 201

    refused = send(http, "k", body={**CAMPAIGN, "name": "second"})
    assert refused.status_code == 422
    assert refused.json()["type"].endswith(":idempotency-key-reused")
    assert "'k' was sent with another request" in refused.json()["detail"]
    for key in ("", "a b"):
        refused = send(http, key)
        assert refused.status_code == 422
        assert "idempotency-key" in refused.json()["detail"]
    assert names(api) == ["first"]


def test_campaigns_are_filtered_by_name_strategy_objective_state_time_and_submitter(
    api: Api,
) -> None:
    api.submit(name="sweep-1")
    api.submit(name="Sweep-2", strategy="exhaustive")
    api.submit(name="both", objective=["tokens_per_s", "memory_headroom"])
    api.post("/campaigns/both/pause")
    assert names(api) == ["both", "Sweep-2", "sweep-1"]
    assert names(api, name_contains="SWEEP") == ["Sweep-2", "sweep-1"]
    assert names(api, strategy="exhaustive") == ["Sweep-2"]
    assert names(api, objective="memory_headroom") == ["both"]
    assert names(api, model="tiny", cluster="local-cpu", state="PAUSED") == ["both"]
    assert names(api, created_after="2999-01-01T00:00:00+02:00") == []
    assert names(api, created_by="nobody") == []


def patch(api: Api, body: Any, status: int = 200, campaign: str = "first") -> Any:
    answer = api.http.patch(f"/v1/campaigns/{campaign}", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_only_the_named_bounds_of_a_budget_and_the_notes_change(api: Api) -> None:
    api.submit(budget={"trials": 3, "wall_time": "10m"})
    changed = patch(api, {"budget": {"trials": 4, "wall_time": "1h"}})
    assert changed["spec"]["budget"] == {"trials": 4, "node_hours": None, "wall_time_s": 3600.0}
    assert changed["progress"]["trials_planned"] == 4
    changed = patch(api, {"budget": {"wall_time_s": None}})
    assert changed["spec"]["budget"] == {"trials": 4, "node_hours": None, "wall_time_s": None}
    assert api.get("/campaigns/first")["spec"]["budget"] == changed["spec"]["budget"]

    notes = "<b>second</b> half\n\tneu: größer, 更快"
    assert patch(api, {"notes": notes})["notes"] == notes
    assert patch(api, {})["notes"] == notes
    assert patch(api, {"notes": ""})["notes"] == ""


def test_a_clone_has_the_named_changes_and_a_numbered_name(api: Api) -> None:
    original = api.submit()
    clone = api.post("/campaigns/first/clone", status=201)
    assert (clone["name"], clone["state"]) == ("first-2", "RUNNING")
    assert clone["notes"] == "clone of first"
    assert clone["spec"] == {**original["spec"], "name": "first-2"}
    assert api.post("/campaigns/first/clone", {"seed": 3}, status=201)["name"] == "first-3"
    named = api.post(
        "/campaigns/first/clone",
        {"name": "mine", "strategy": "exhaustive", "space": space_of(global_batch_size=8, dp=1)},
        status=201,
    )
    assert (named["name"], named["strategy"]) == ("mine", "exhaustive")
    assert named["num_legal_layouts"] == 1

    api.submit(name="x" * 64)
    assert api.post(f"/campaigns/{'x' * 64}/clone", status=201)["name"] == "x" * 62 + "-2"


def test_a_clone_on_another_cluster_loses_the_warnings_of_the_first(api: Api) -> None:
    api.submit(cluster={"name": "guessed", "devices_per_node": 4})
    clone = api.post("/campaigns/first/clone", {"cluster": CAMPAIGN["cluster"]}, status=201)
    assert [warning for warning in clone["warnings"] if "guessed" in warning] == []
    of_cluster, few = api.post("/campaigns/first/clone", status=201)["warnings"]
    assert "guessed" in of_cluster
    assert few.startswith("the space has few layouts: 4 of 4")


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

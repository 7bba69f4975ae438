"""Campaigns after their submission: sent twice, changed, and cloned."""

from __future__ import annotations

from typing import Any

import pytest
from httpx import Response

from search_spaces.spec.layout import Layout
from tests.kit.api import CAMPAIGN, Api
from tests.kit.campaigns import space_of


@pytest.fixture(scope="module")
def api(module_api: Api) -> Api:
    return module_api


def send(api: Api, key: str, path: str, body: Any, **headers: str) -> Response:
    headers = {"Idempotency-Key": key, **headers}
    return api.http.post(f"/v1/campaigns{path}", json=body, headers=headers)


def clone(api: Api, campaign: str, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = api.post(f"/campaigns/{campaign}/clone", changes, status=201)
    return made


def test_a_request_that_is_repeated_makes_one_campaign_and_shows_it_as_it_is(api: Api) -> None:
    document = {**CAMPAIGN, "name": "once"}
    for path, body, name in (("", document, "once"), ("/once/clone", {}, "once-2")):
        first, again = (send(api, f"key{path}", path, body) for _ in range(2))
        assert (first.status_code, again.status_code) == (201, 201)
        assert first.json()["id"] == again.json()["id"]
        assert first.json()["name"] == name
        assert again.headers["Location"] == f"/v1/campaigns/{name}"
        assert again.headers["Idempotent-Replay"] == "true"
        assert "Idempotent-Replay" not in first.headers
    found = api.get("/campaigns", name_contains="once")["campaigns"]
    assert [each["name"] for each in found] == ["once-2", "once"]
    api.post("/campaigns/once/pause")
    assert send(api, "key", "", document).json()["state"] == "PAUSED"


def test_an_idempotency_key_belongs_to_one_sender_and_one_accepted_request(api: Api) -> None:
    document = {**CAMPAIGN, "name": "keyed"}
    assert send(api, "k", "", {**document, "model": "gpt-0"}).status_code == 422
    assert send(api, "k", "", document).status_code == 201
    for path, body in (("", {**document, "name": "second"}), ("/keyed/clone", {})):
        refused = send(api, "k", path, body)
        assert refused.status_code == 422
        assert refused.json()["type"].endswith(":idempotency-key-reused")
        assert "'k' was sent with another request" in refused.json()["detail"]
    for key in ("", "a b"):
        refused = send(api, key, "", document)
        assert refused.status_code == 422
        assert "idempotency-key" in refused.json()["detail"]

    token = api.post("/tokens", {"name": "other", "role": "submitter"}, status=201)["token"]
    theirs = {**CAMPAIGN, "name": "theirs"}
    other = send(api, "k", "", theirs, Authorization=f"Bearer {token}")
    assert other.status_code == 201
    assert "Idempotent-Replay" not in other.headers
    found = api.get("/campaigns", name_contains="keyed")["campaigns"]
    assert [each["name"] for each in found] == ["keyed"]


def test_only_the_named_bounds_of_a_budget_and_the_notes_change(api: Api) -> None:
    def patch(**changes: Any) -> Any:
        answer = api.http.patch("/v1/campaigns/patched", json=changes)
        assert answer.status_code == 200, answer.text
        return answer.json()

    api.submit(name="patched", budget={"trials": 3, "wall_time": "10m"})
    changed = patch(budget={"trials": 4, "wall_time": "1h"})
    assert changed["spec"]["budget"] == {"trials": 4, "node_hours": None, "wall_time_s": 3600.0}
    assert changed["progress"]["trials_planned"] == 4
    changed = patch(budget={"wall_time_s": None})
    assert changed["spec"]["budget"] == {"trials": 4, "node_hours": None, "wall_time_s": None}
    assert api.get("/campaigns/patched")["spec"]["budget"] == changed["spec"]["budget"]
    notes = "<b>second</b> half\n\tneu: größer, 更快"
    assert patch(notes=notes)["notes"] == notes
    assert patch()["notes"] == notes
    assert patch(notes="")["notes"] == ""


def test_a_clone_has_the_named_changes_and_a_numbered_name(api: Api) -> None:
    original = api.submit(name="source", cluster={"name": "guessed", "devices_per_node": 4})
    plain = clone(api, "source")
    assert (plain["name"], plain["state"]) == ("source-2", "RUNNING")
    assert plain["notes"] == "clone of source"
    assert plain["spec"] == {**original["spec"], "name": "source-2"}
    assert plain["warnings"] == original["warnings"]
    assert "guessed" in plain["warnings"][0]
    moved = clone(api, "source", seed=3, cluster=CAMPAIGN["cluster"])
    assert moved["name"] == "source-3"
    assert [warning for warning in moved["warnings"] if "guessed" in warning] == []
    space = space_of(global_batch_size=8, dp=1)
    named = clone(api, "source", name="mine", strategy="exhaustive", space=space)
    assert (named["name"], named["strategy"]) == ("mine", "exhaustive")
    assert named["num_legal_layouts"] == 1
    api.submit(name="x" * 64)
    assert clone(api, "x" * 64)["name"] == "x" * 62 + "-2"


def test_a_clone_keeps_changes_or_drops_the_baseline(api: Api) -> None:
    slow, other = (Layout(**degree, num_microbatches=8) for degree in ({"tp": 2}, {"pp": 2}))
    api.submit(name="compared", baseline={"tp": 2})
    kept = clone(api, "compared")["baseline"]
    assert (kept["layout"], kept["trial_number"]) == (slow.to_mapping(every_knob=True), None)
    changed = clone(api, "compared", baseline={"pp": 2})["baseline"]
    assert changed["layout"] == other.to_mapping(every_knob=True)
    assert clone(api, "compared", baseline=None)["baseline"] is None


def test_a_clone_of_an_imported_campaign_runs(api: Api) -> None:
    api.submit(name="measured")
    figures = {"tokens_per_step": 1024, "tokens_per_s": 2000.0, "step_time_s": 0.512}
    api.complete(api.register(), "measured", Layout(num_microbatches=8), **figures)
    table = api.http.get("/v1/campaigns/measured/table").content
    path, headers = "/v1/campaigns/import?name=imported", {"Content-Type": "text/csv"}
    imported = api.http.post(path, content=table, headers=headers)
    assert imported.status_code == 201, imported.text
    made = clone(api, "imported", budget={"trials": 1})
    assert (made["state"], made["strategy"]) == ("RUNNING", "exhaustive")

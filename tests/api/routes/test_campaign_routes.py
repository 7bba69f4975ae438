"""Campaigns: submitted, also twice, listed, followed, asked of workers, changed, and cloned."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from httpx import Response

from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, Api, answered, measured_as_asked
from tests.kit.campaigns import space_of
from tests.kit.store import make_iterations

YAML = {"Content-Type": "application/yaml"}
GUESSED = {"name": "mine", "devices_per_node": 4}


def names(api: Api, **query: Any) -> list[str]:
    return [campaign["name"] for campaign in api.get("/campaigns", **query)["campaigns"]]


def progress(api: Api, campaign: str = "first") -> Any:
    return api.get(f"/campaigns/{campaign}")["progress"]


def test_a_campaign_is_submitted_as_json_and_read_by_its_name_or_id(api: Api) -> None:
    created = api.submit(name="json")
    assert (created["name"], created["state"]) == ("json", "RUNNING")
    assert (created["num_legal_layouts"], created["progress"]["trials_planned"]) == (4, 4)
    assert created["spec"]["model"]["num_layers"] == 4
    assert api.get("/campaigns/json")["id"] == created["id"]
    assert api.get(f"/campaigns/{created['id']}")["name"] == "json"


def test_a_campaign_as_it_was_resolved_may_be_submitted_again_and_as_yaml(api: Api) -> None:
    created = api.submit(name="resolved")
    again = api.post("/campaigns", {**created["spec"], "name": "again"}, status=201)
    assert again["spec"] == {**created["spec"], "name": "again"}

    text = yaml.safe_dump({**CAMPAIGN, "name": "yaml"})
    answer = answered(api.http.post("/v1/campaigns", content=text, headers=YAML), 201)
    assert answer.headers["Location"] == "/v1/campaigns/yaml"
    assert answer.json()["spec"] == {**created["spec"], "name": "yaml"}


def test_a_campaign_has_the_precision_of_its_cluster_and_a_warning_of_what_was_guessed_of_it(
    api: Api,
) -> None:
    assert api.submit(name="precise")["spec"]["space"]["precision"] == "fp32"
    of_cluster, few = api.submit(name="guessed", cluster=GUESSED)["warnings"]
    assert "mine" in of_cluster
    assert few.startswith("the space has few layouts: 4 of 4")


def test_warnings_of_a_submitted_document_are_shown_as_the_submitters(api: Api) -> None:
    fakes = ["the budget is too small", "the space has few layouts: 1 of 9 combinations legal"]
    fakes.append("the parameters of the trainer x could not be checked: ...")
    said = "the submitted document says: the budget is too small"
    own = api.submit(name="sincere")["warnings"]
    made = api.submit(name="faked", warnings=fakes)
    assert made["warnings"] == [said, *own]
    assert clone(api, "faked", name="faked-again")["warnings"] == [said, *own]
    changed = clone(api, "faked", name="faked-otherwise", warnings=["hello"])
    assert changed["warnings"] == ["the submitted document says: hello", own[-1]]
    again = api.post("/campaigns", {**made["spec"], "name": "faked-resent"}, status=201)
    assert again["warnings"] == [said, *own]
    # A text that stands elsewhere in a stored document is no warning of the service.
    device = {**CAMPAIGN["cluster"], "device": "hello there"}
    api.submit(name="device", cluster=device)
    other = api.submit(name="other-fake", warnings=["hello there"])["warnings"]
    assert other[0] == "the submitted document says: hello there"
    long = {**CAMPAIGN, "name": "too-long", "warnings": ["x" * 1000]}
    problem = answered(api.http.post("/v1/campaigns", json=long), 422).json()
    assert problem["errors"][0]["field"] == "body.warnings"


@pytest.fixture(scope="module")
def listed(api: Api) -> Api:
    """With three campaigns of the model `listed`, the last of which is paused."""
    model = {"preset": "tiny", "name": "listed"}
    api.submit(name="sweep-1", model=model)
    api.submit(name="Sweep-2", model=model, strategy="exhaustive")
    api.submit(name="both", model=model, objective=["tokens_per_s", "memory_headroom"])
    api.post("/campaigns/both/pause")
    return api


def test_campaigns_are_listed_in_pages(listed: Api) -> None:
    query: dict[str, Any] = {"model": "listed", "limit": 2}
    first = listed.get("/campaigns", **query)
    second = listed.get("/campaigns", **query, cursor=first["next_cursor"])
    found = [campaign["name"] for page in (first, second) for campaign in page["campaigns"]]
    assert found == ["both", "Sweep-2", "sweep-1"]
    assert second["next_cursor"] is None
    assert listed.get("/campaigns", model="listed", limit=3)["next_cursor"] is None, "it is full"


def test_campaigns_are_found_by_each_of_their_features(listed: Api) -> None:
    assert names(listed, name_contains="SWEEP") == ["Sweep-2", "sweep-1"]
    assert names(listed, model="listed", strategy="exhaustive") == ["Sweep-2"]
    assert names(listed, model="listed", objective="memory_headroom") == ["both"]
    assert names(listed, model="listed", cluster="local-cpu", state="PAUSED") == ["both"]
    assert names(listed, created_after="2999-01-01T00:00:00+02:00") == []
    assert names(listed, created_by="nobody") == []


def rate(tokens_per_s: float) -> dict[str, Any]:
    """What a measurement of this rate, of three warm-up and three timed iterations, differs in."""
    iterations = make_iterations(8 * 128 / tokens_per_s, warmup=3, timed=3)
    return {"tokens_per_s": tokens_per_s, "iterations": iterations}


def submit_asked(api: Api, name: str) -> tuple[str, dict[str, Any]]:
    """A worker and a campaign of three trials that are alone on their cluster."""
    probe = {"warmup": 3, "iterations": 3, "deadline_s": 60}
    cluster = {**CAMPAIGN["cluster"], "name": name}
    created = api.submit(name=name, cluster=cluster, budget={"trials": 3}, seed=7, probe=probe)
    return api.register(name, cluster=name), created


def test_a_worker_is_asked_what_was_submitted(api: Api) -> None:
    worker, created = submit_asked(api, "asked")
    layout = Layout(pp=2, num_microbatches=8)
    api.store.trials.add(created["id"], layout)
    request = api.lease(worker)["request"]
    assert (request["layout"], request["model"]) == (layout.to_mapping(), created["spec"]["model"])
    assert (request["seed"], request["warmup"], request["iterations"]) == (7, 3, 3)
    assert request["memory_limit_bytes"] == 8 << 30


def test_the_outcome_of_a_trial_is_kept_in_full(api: Api) -> None:
    worker, created = submit_asked(api, "kept")
    layout = Layout(pp=2, num_microbatches=8)
    trial = api.store.trials.add(created["id"], layout)
    lease = api.lease(worker)
    sent = measured_as_asked(lease, layout, **rate(100.0))
    assert api.report(worker, lease, sent)["accepted"]
    read = api.get(f"/trials/{trial.id}")
    assert [i["loss"] for i in read["iterations"]] == [i.loss for i in sent.measurement.iterations]
    assert read["measurement"]["peak_memory_bytes_by_stage"] == [5 << 30, (5 << 30) - 1]
    assert (read["environment"]["git_revision"], read["log_tail"]) == ("abc", "the last line\n")
    assert read["attempts"][0]["worker_name"] == "kept"
    assert read["layout"] == layout.to_mapping(every_knob=True) | {"job": {}}


def test_progress_has_the_trials_that_ended_the_best_and_the_time_left(api: Api) -> None:
    worker, _ = submit_asked(api, "progress")
    api.complete(worker, "progress", Layout(pp=2, num_microbatches=8), **rate(100.0))
    api.complete(worker, "progress", Layout(tp=2, num_microbatches=8), **rate(300.0))
    told = progress(api, "progress")
    assert (told["trials"]["COMPLETED"], told["trials_ended"], told["trials_planned"]) == (2, 2, 3)
    assert (told["best"], told["best_trial"], told["seconds_left"]) == (300.0, 2, None)
    assert told["best_layout"].startswith("n1-tp2")
    api.post("/campaigns/progress/cancel")
    assert progress(api, "progress")["seconds_left"] == 0
    api.submit(name="timed", budget={"wall_time_s": 600})
    assert progress(api, "timed")["seconds_left"] == pytest.approx(600, abs=30)


def send(api: Api, key: str, path: str, body: Any, **headers: str) -> Response:
    headers = {"Idempotency-Key": key, **headers}
    return api.http.post(f"/v1/campaigns{path}", json=body, headers=headers)


def clone(api: Api, campaign: str, **changes: Any) -> dict[str, Any]:
    return api.post(f"/campaigns/{campaign}/clone", changes, status=201)


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
    assert names(api, name_contains="once") == ["once-2", "once"]
    api.post("/campaigns/once/pause")
    assert send(api, "key", "", document).json()["state"] == "PAUSED"


def test_an_idempotency_key_belongs_to_one_sender_and_one_accepted_request(api: Api) -> None:
    document = {**CAMPAIGN, "name": "keyed"}
    assert send(api, "k", "", {**document, "model": "gpt-0"}).status_code == 422
    assert send(api, "k", "", document).status_code == 201
    for path, body in (("", {**document, "name": "second"}), ("/keyed/clone", {})):
        refused = answered(send(api, "k", path, body), 422, "'k' was sent with another request")
        assert refused.json()["type"].endswith(":idempotency-key-reused")
    for key in ("", "a b"):
        answered(send(api, key, "", document), 422, "idempotency-key")

    theirs = {**CAMPAIGN, "name": "theirs"}
    other = answered(send(api, "k", "", theirs, **api.holder("other", "submitter")), 201)
    assert "Idempotent-Replay" not in other.headers
    assert names(api, name_contains="keyed") == ["keyed"]


def test_only_the_named_bounds_of_a_budget_and_the_notes_change(api: Api) -> None:
    def patch(**changes: Any) -> Any:
        return answered(api.http.patch("/v1/campaigns/patched", json=changes), 200).json()

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


def test_a_clone_is_its_original_with_a_numbered_name(api: Api) -> None:
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


def test_a_clone_has_the_named_changes(api: Api) -> None:
    api.submit(name="origin")
    space = space_of(global_batch_size=8, dp=1)
    named = clone(api, "origin", name="mine", strategy="exhaustive", space=space)
    assert (named["name"], named["strategy"]) == ("mine", "exhaustive")
    assert named["num_legal_layouts"] == 1


def test_a_numbered_name_is_cut_where_it_would_be_too_long(api: Api) -> None:
    api.submit(name="x" * 64)
    assert clone(api, "x" * 64)["name"] == "x" * 62 + "-2"


def test_a_clone_keeps_changes_or_drops_the_baseline(api: Api) -> None:
    slow, other = (Layout(**degree, num_microbatches=8) for degree in ({"tp": 2}, {"pp": 2}))
    api.submit(name="compared", baseline={"tp": 2})
    kept = clone(api, "compared")["baseline"]
    assert kept["layout"] == slow.to_mapping(every_knob=True) | {"job": {}}
    assert kept["trial_number"] is None
    changed = clone(api, "compared", baseline={"pp": 2})["baseline"]
    assert changed["layout"] == other.to_mapping(every_knob=True) | {"job": {}}
    assert clone(api, "compared", baseline=None)["baseline"] is None


def test_a_clone_of_an_imported_campaign_runs(api: Api) -> None:
    api.submit(name="measured")
    figures = {"tokens_per_step": 1024, "tokens_per_s": 2000.0, "step_time_s": 0.512}
    api.complete(api.register(), "measured", Layout(num_microbatches=8), **figures)
    table = api.http.get("/v1/campaigns/measured/table").content
    path, headers = "/v1/campaigns/import?name=imported", {"Content-Type": "text/csv"}
    answered(api.http.post(path, content=table, headers=headers), 201)
    made = clone(api, "imported", budget={"trials": 1})
    assert (made["state"], made["strategy"]) == ("RUNNING", "exhaustive")

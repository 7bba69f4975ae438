import json
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from search_spaces.spec.layout import Layout
from tests.kit.api import CAMPAIGN, Api
from tests.kit.store import completed, failed

YAML = {"Content-Type": "application/yaml"}


def test_a_campaign_is_submitted_as_json(api: Api) -> None:
    created = api.submit()
    assert (created["name"], created["state"], created["num_legal_layouts"]) == (
        "first",
        "RUNNING",
        4,
    )
    assert created["spec"]["model"]["num_layers"] == 4
    assert created["progress"]["trials_planned"] == 4
    assert api.get("/campaigns/first")["id"] == created["id"]
    assert api.get(f"/campaigns/{created['id']}")["name"] == "first"


def test_a_campaign_is_submitted_as_yaml(http: TestClient) -> None:
    answer = http.post("/v1/campaigns", content=yaml.safe_dump(CAMPAIGN), headers=YAML)
    assert answer.status_code == 201, answer.text
    assert answer.headers["Location"] == "/v1/campaigns/first"
    assert answer.json()["spec"]["budget"]["trials"] == 5


def test_a_resolved_campaign_can_be_submitted_again(api: Api) -> None:
    spec = api.submit()["spec"]
    again = api.post("/campaigns", {**spec, "name": "second"}, status=201)
    assert again["spec"] == {**spec, "name": "second"}


def test_a_guessed_cluster_comes_with_a_warning(api: Api) -> None:
    cluster = {"name": "mine", "devices_per_node": 4}
    (warning,) = api.submit(cluster=cluster)["warnings"]
    assert "mine" in warning


@pytest.mark.parametrize("document", [[], 3])
def test_a_document_must_be_a_mapping(api: Api, document: Any) -> None:
    assert "not a mapping" in api.post("/campaigns", document, status=422)["detail"]


def test_an_empty_legal_set_says_which_rule_excluded_how_many(api: Api) -> None:
    space = {**CAMPAIGN["space"], "tp": [3, 6]}
    problem = api.post("/campaigns", {**CAMPAIGN, "space": space}, status=422)
    assert problem["type"].endswith(":no-legal-layout")
    assert "heads_over_tp excludes 4" in problem["detail"]
    assert api.get("/campaigns")["campaigns"] == []


def test_a_model_too_large_for_every_layout_is_refused(api: Api) -> None:
    problem = api.post("/campaigns", {**CAMPAIGN, "model": "gpt-22b"}, status=422)
    assert problem["type"].endswith(":model-too-large")
    assert "GiB" in problem["detail"]
    assert api.get("/campaigns")["campaigns"] == []


def test_a_taken_name_is_a_conflict(api: Api) -> None:
    api.submit()
    problem = api.post("/campaigns", CAMPAIGN, status=409)
    assert problem["type"].endswith(":campaign-duplicate")
    assert "'first' exists already" in problem["detail"]
    assert len(api.get("/campaigns")["campaigns"]) == 1


def test_malformed_yaml_is_a_400_that_says_where(http: TestClient) -> None:
    body = b"name: x\nmodel: [tiny\nspace: 1\n"
    answer = http.post("/v1/campaigns", content=body, headers=YAML)
    assert answer.status_code == 400, answer.text
    assert "line 3" in answer.json()["detail"]


def test_another_content_type_is_refused(http: TestClient) -> None:
    answer = http.post("/v1/campaigns", content="x", headers={"Content-Type": "text/html"})
    assert answer.status_code == 415
    assert "application/yaml" in answer.json()["detail"]


def test_campaigns_are_listed_in_pages(api: Api) -> None:
    for number in range(5):
        api.submit(name=f"c{number}")
    api.post("/campaigns/c3/pause")
    first = api.get("/campaigns", limit=2)
    second = api.get("/campaigns", limit=2, cursor=first["next_cursor"])
    third = api.get("/campaigns", limit=2, cursor=second["next_cursor"])
    names = [c["name"] for page in (first, second, third) for c in page["campaigns"]]
    assert names == ["c4", "c3", "c2", "c1", "c0"]
    assert third["next_cursor"] is None
    paused = api.get("/campaigns", state="PAUSED")["campaigns"]
    assert [c["name"] for c in paused] == ["c3"]
    assert "next_cursor" in api.get("/campaigns", limit=5)
    assert api.get("/campaigns", limit=5)["next_cursor"] is None


@pytest.mark.parametrize("cursor", ["!", "OTk5OTk5OTk5OTk5OTk5OTk5OTk5OTk"])
def test_an_invalid_cursor_is_refused(api: Api, cursor: str) -> None:
    assert "cursor" in api.get("/campaigns", status=400, cursor=cursor)["detail"]


def test_pause_resume_and_cancel_change_the_state_and_nothing_twice(api: Api) -> None:
    api.submit()
    for action, state in [("pause", "PAUSED"), ("resume", "RUNNING"), ("cancel", "CANCELLED")]:
        for _ in range(2):
            assert api.post(f"/campaigns/first/{action}")["state"] == state
    for action in ("pause", "resume"):
        problem = api.post(f"/campaigns/first/{action}", status=409)
        assert problem["type"].endswith(":campaign-state")
        assert "CANCELLED" in problem["detail"]


def test_an_unknown_campaign_is_a_404_everywhere(api: Api) -> None:
    for path in ("", "/trials", "/leaderboard", "/exports?format=trainer"):
        assert "nobody" in api.get(f"/campaigns/nobody{path}", status=404)["detail"]
    for number in ("7", "9" * 30):
        api.get(f"/campaigns/{number}", status=404)
    api.post("/campaigns/nobody/pause", status=404)


def test_progress_counts_trials_and_names_the_best(api: Api) -> None:
    api.submit(budget={"trials": 3})
    worker = api.register()
    api.complete(worker, "first", Layout(num_microbatches=8), tokens_per_s=100.0)
    api.complete(worker, "first", Layout(tp=2, num_microbatches=8), tokens_per_s=300.0)
    progress = api.get("/campaigns/first")["progress"]
    assert progress["trials"]["COMPLETED"] == 2
    assert (progress["trials_ended"], progress["trials_planned"]) == (2, 3)
    assert (progress["best"], progress["best_trial"]) == (300.0, 2)
    assert progress["best_layout"].startswith("n1-tp2")


def test_a_campaign_without_a_driver_says_so(api: Api) -> None:
    api.submit()
    assert "no driver is at work" in api.get("/campaigns/first")["progress"]["waiting_reason"]


def test_a_campaign_without_a_worker_of_its_cluster_says_so(api: Api) -> None:
    api.submit()
    api.store.driver.acquire()
    api.register(cluster="elsewhere")
    reason = api.get("/campaigns/first")["progress"]["waiting_reason"]
    assert "no worker of cluster local-cpu" in reason


def test_a_campaign_whose_workers_are_too_small_says_so(api: Api) -> None:
    campaign = api.submit()
    api.store.driver.acquire()
    api.register("small", devices_per_node=1)
    api.store.trials.add(campaign["id"], Layout(tp=2, num_microbatches=8))
    reason = api.get("/campaigns/first")["progress"]["waiting_reason"]
    assert "needs 2 devices on 1 node," in reason
    assert "(small) has 1 node of 1 device" in reason


def test_a_campaign_with_running_trials_waits_for_nothing(api: Api) -> None:
    campaign = api.submit()
    api.store.driver.acquire()
    worker = api.register()
    trial = api.store.trials.add(campaign["id"], Layout(num_microbatches=8))
    assert api.get("/campaigns/first")["progress"]["waiting_reason"] is None
    lease = api.lease(worker)
    assert lease["trial_id"] == trial.id
    assert api.get("/campaigns/first")["progress"]["waiting_reason"] is None
    api.report(worker, lease, failed())
    api.post("/campaigns/first/pause")
    assert "paused" in api.get("/campaigns/first")["progress"]["waiting_reason"]


def test_the_time_left_follows_the_budget_that_runs_out_first(api: Api) -> None:
    api.submit(name="timed", budget={"wall_time_s": 600})
    assert api.get("/campaigns/timed")["progress"]["seconds_left"] == pytest.approx(600, abs=30)
    api.submit(name="counted")
    assert api.get("/campaigns/counted")["progress"]["seconds_left"] is None
    api.post("/campaigns/counted/cancel")
    assert api.get("/campaigns/counted")["progress"]["seconds_left"] == 0


def test_the_campaign_that_was_submitted_is_what_a_worker_is_asked_to_run(api: Api) -> None:
    created = api.submit(seed=7, probe={"warmup": 3, "iterations": 3, "deadline_s": 60})
    worker = api.register()
    layout = Layout(tp=2, num_microbatches=8)
    api.store.trials.add(created["id"], layout)
    request = api.lease(worker)["request"]
    assert request["layout"] == layout.to_mapping()
    assert request["model"] == created["spec"]["model"]
    assert (request["seed"], request["warmup"], request["iterations"]) == (7, 3, 3)
    assert request["memory_limit_bytes"] == 8 << 30
    json.dumps(request)


def test_an_outcome_is_kept_in_full(api: Api) -> None:
    api.submit()
    worker = api.register()
    layout = Layout(pp=2, num_microbatches=8)
    trial = api.get(f"/trials/{api.complete(worker, 'first', layout)}")
    sent = completed(layout)
    assert sent.measurement is not None
    assert [i["loss"] for i in trial["iterations"]] == [i.loss for i in sent.measurement.iterations]
    assert trial["measurement"]["peak_memory_bytes_by_stage"] == [5 << 30, (5 << 30) - 1]
    assert trial["environment"]["git_revision"] == "abc"
    assert trial["log_tail"] == "the last line\n"
    assert trial["attempts"][0]["worker_name"] == "w1"
    assert trial["layout"] == layout.to_mapping()


def test_a_campaign_says_how_many_trials_of_others_it_starts_from(api: Api) -> None:
    api.submit()
    api.complete(api.register(), "first", Layout(num_microbatches=8))
    api.post("/campaigns/first/cancel")
    assert api.submit(name="second")["starts_from"] == 1
    assert api.submit(name="third", knowledge="none")["starts_from"] == 0
    named = api.submit(name="fourth", knowledge="none", start_from=["first"])
    assert (named["starts_from"], named["spec"]["start_from"]) == (1, ["first"])


def test_a_campaign_cannot_start_from_one_that_is_not_there(api: Api) -> None:
    body = {**CAMPAIGN, "start_from": ["nobody"]}
    problem = api.post("/campaigns", body, status=422)
    assert problem["detail"] == "start_from: there is no campaign named 'nobody'"
    assert problem["type"].endswith("campaign-invalid")

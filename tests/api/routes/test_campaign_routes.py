import json
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from search_spaces.spec.layout import Layout
from tests.kit.api import CAMPAIGN, Api
from tests.kit.store import completed, failed

YAML = {"Content-Type": "application/yaml"}
ON_GPUS: dict[str, Any] = {
    **CAMPAIGN,
    "name": "large",
    "model": "llama-70b",
    "cluster": "a100-sxm",
    "space": {"global_batch_size": 1024, "num_nodes": 64, "tp": 8, "pp": 8, "recompute": "full"},
}


def why_it_waits(api: Api) -> Any:
    return api.get("/campaigns/first")["progress"]["waiting_reason"]


def test_a_campaign_is_submitted_as_json_and_again_as_it_was_resolved(api: Api) -> None:
    created = api.submit()
    assert (created["name"], created["state"]) == ("first", "RUNNING")
    assert created["num_legal_layouts"] == 4
    assert created["spec"]["model"]["num_layers"] == 4
    assert created["progress"]["trials_planned"] == 4
    assert api.get("/campaigns/first")["id"] == created["id"]
    assert api.get(f"/campaigns/{created['id']}")["name"] == "first"

    again = api.post("/campaigns", {**created["spec"], "name": "second"}, status=201)
    assert again["spec"] == {**created["spec"], "name": "second"}
    # It is stored with the precision of its cluster, and with a warning of what was guessed of it.
    assert created["spec"]["space"]["precision"] == "fp32"
    assert api.post("/campaigns", ON_GPUS, 201)["spec"]["space"]["precision"] == "bf16"
    assert api.get("/campaigns/large")["spec"]["space"]["precision"] == "bf16"
    guessed = api.submit(name="third", cluster={"name": "mine", "devices_per_node": 4})
    of_cluster, few = guessed["warnings"]
    assert "mine" in of_cluster
    assert few.startswith("the space has few layouts: 4 of 4")


def test_a_campaign_is_submitted_as_yaml(http: TestClient) -> None:
    answer = http.post("/v1/campaigns", content=yaml.safe_dump(CAMPAIGN), headers=YAML)
    assert answer.status_code == 201, answer.text
    assert answer.headers["Location"] == "/v1/campaigns/first"
    assert answer.json()["spec"]["budget"]["trials"] == 5


def test_a_document_that_is_no_yaml_or_of_another_type_is_refused(http: TestClient) -> None:
    body = b"name: x\nmodel: [tiny\nspace: 1\n"
    answer = http.post("/v1/campaigns", content=body, headers=YAML)
    assert answer.status_code == 400, answer.text
    assert "line 3" in answer.json()["detail"]

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


def test_a_campaign_says_what_it_waits_for(api: Api) -> None:
    campaign = api.submit()
    assert "no driver is at work" in why_it_waits(api)

    api.store.driver.acquire()
    api.register(cluster="elsewhere")
    reason = why_it_waits(api)
    assert "no worker of cluster local-cpu" in reason

    api.register("small", devices_per_node=1)
    api.store.trials.add(campaign["id"], Layout(tp=2, num_microbatches=8))
    reason = why_it_waits(api)
    assert "needs 2 devices on 1 node," in reason
    assert "(small) has 1 node of 1 device" in reason


def test_a_campaign_with_running_trials_waits_for_nothing(api: Api) -> None:
    campaign = api.submit()
    api.store.driver.acquire()
    worker = api.register()
    trial = api.store.trials.add(campaign["id"], Layout(num_microbatches=8))
    assert why_it_waits(api) is None
    lease = api.lease(worker)
    assert lease["trial_id"] == trial.id
    assert why_it_waits(api) is None
    api.report(worker, lease, failed())
    api.post("/campaigns/first/pause")
    assert "paused" in why_it_waits(api)


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
    assert trial["layout"] == layout.to_mapping(every_knob=True)


def test_a_campaign_says_how_many_trials_of_others_it_starts_from(api: Api) -> None:
    api.submit()
    api.complete(api.register(), "first", Layout(num_microbatches=8))
    api.post("/campaigns/first/cancel")
    assert api.submit(name="second")["starts_from"] == 1
    assert api.submit(name="third", knowledge="none")["starts_from"] == 0
    named = api.submit(name="fourth", knowledge="none", start_from=["first"])
    assert (named["starts_from"], named["spec"]["start_from"]) == (1, ["first"])

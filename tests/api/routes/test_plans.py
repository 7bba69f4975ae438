"""Plans by the service: the same as on the command line, with what the database knows."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from fastapi.testclient import TestClient

from layout_tuner.api.campaigns import submission
from layout_tuner.api.schemas.plans import PlanRead
from layout_tuner.cli.predictions.plan import plan as plan_command
from layout_tuner.predictions.belief.plan import make_plan
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.results_db.campaigns.plans import PlanOptions
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.tuner.driver.driver import Driver
from tests.api.routes.test_trainers import THEIRS
from tests.kit.api import CAMPAIGN, CLUSTER, Api, answered, ends
from tests.kit.campaigns import space_of
from tests.kit.page import Page
from tests.kit.waiting import wait_until

LAYOUT = Layout(tp=2, num_microbatches=8)


def test_a_plan_is_the_document_that_the_command_prints(api: Api, tmp_path: Path) -> None:
    (file := tmp_path / "first.yaml").write_text(yaml.safe_dump(CAMPAIGN))
    flags = ["--json", "--tokens", "1M", "--nodes", "1", "--data-dir", str(tmp_path)]
    printed = ends(CliRunner().invoke(plan_command, [str(file), *flags]), 0)
    planned = api.post("/plans?tokens=1M&nodes=1", CAMPAIGN)
    assert planned == json.loads(printed.stdout)
    assert planned["knowledge"]["basis"] == "data sheets"
    assert planned["layouts"][0]["job"]["duration"]["num_steps"] > 1

    query = "top=2&probe_start_s=5&tokens=2e6&mtbf_hours=100"
    planned = api.post(f"/plans?{query}", CAMPAIGN)
    job = TrainingJob(tokens=2_000_000, mtbf_hours=100.0)
    expected = make_plan(CampaignSpec.from_document(CAMPAIGN), top=2, probe_start_s=5.0, job=job)
    assert planned == json.loads(json.dumps(asdict(expected)))


def test_a_plan_may_be_of_yaml_and_of_a_users_cluster_and_is_not_stored(api: Api) -> None:
    content, headers = yaml.safe_dump(CAMPAIGN), {"Content-Type": "application/yaml"}
    answer = api.http.post("/v1/plans", content=content, headers=headers)
    assert answer.json() == api.post("/plans", CAMPAIGN)
    api.http.put("/v1/clusters/ours", json={**CLUSTER, "name": "ours"})
    assert api.post("/plans", {**CAMPAIGN, "cluster": "ours"})["cluster"] == "ours"
    assert api.get("/campaigns")["campaigns"] == []


@pytest.mark.parametrize("max_at_once", [submission.MAX_AT_ONCE, 3], ids=["at once", "driver"])
def test_a_plan_is_refused_like_a_submission(
    api: Api, monkeypatch: pytest.MonkeyPatch, max_at_once: int
) -> None:
    monkeypatch.setattr(submission, "MAX_AT_ONCE", max_at_once)
    changes: list[dict[str, Any]] = [
        {"model": "gpt-0"},
        {"start_from": ["nobody"]},
        {"space": space_of(global_batch_size=7, dp=2)},
        {"cluster": {**CLUSTER, "device_memory_bytes": 1 << 20}},
    ]
    for change in changes:
        planned = api.post("/plans", {**CAMPAIGN, **change}, status=422)
        submitted = api.post("/campaigns", {**CAMPAIGN, **change}, status=422)
        for part in ("detail", "errors"):
            assert planned.get(part) == submitted.get(part), change
    assert api.store.plans.waiting() == []


def test_the_driver_makes_the_plans_of_a_large_space_at_most_eight_at_once(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = api.post("/plans?top=2&probe_start_s=5&tokens=1M", CAMPAIGN)
    monkeypatch.setattr(submission, "MAX_AT_ONCE", 3)
    answer = api.http.post("/v1/plans?top=2&probe_start_s=5&tokens=1M", json=CAMPAIGN)
    waiting = answered(answer, 202).json()
    assert (waiting["state"], waiting["plan"]) == ("WAITING", None)
    path = f"/plans/{waiting['id']}"
    assert answer.headers["Location"] == f"/v1{path}"
    assert api.get(path) == waiting

    driver = Driver(api.store)
    wait_until(
        "the driver has made it", lambda: driver.step() and api.get(path)["state"] != "WAITING"
    )
    done = api.get(path)
    assert (done["state"], done["problem"], done["plan"]) == ("DONE", "", expected)
    assert api.get("/campaigns")["campaigns"] == []
    for _ in range(8):
        api.post("/plans", CAMPAIGN, status=202)
    assert "8 plans of" in api.post("/plans", CAMPAIGN, status=409)["detail"]


@pytest.fixture
def measured(http: TestClient) -> Api:
    """A service of its own, whose only campaign has measured one layout and ended."""
    api = Api(http)
    api.submit()
    api.complete(api.register(), "first", LAYOUT)
    api.post("/campaigns/first/cancel")
    return api


def test_a_plan_uses_what_campaigns_that_have_ended_measured(http: TestClient) -> None:
    api = Api(http)

    def predicted_s(plan: Any) -> float:
        (found,) = (each for each in plan["layouts"] if each["layout_key"] == LAYOUT.key)
        return float(found["predicted"]["step_time_s"])

    before = api.post("/plans", CAMPAIGN)
    api.submit()
    api.complete(api.register(), "first", LAYOUT)
    assert api.post("/plans", CAMPAIGN)["knowledge"]["num_measurements"] == 0, "it has not ended"
    api.post("/campaigns/first/cancel")
    after = api.post("/plans", CAMPAIGN)
    used = after["knowledge"]
    assert (used["models"], used["clusters"]) == (["tiny"], ["local-cpu"])
    assert used["basis"] == "measurements"
    assert (used["num_measurements"], used["num_step_times"]) == (1, 1)
    (trial,) = api.get("/campaigns/first/leaderboard")["trials"]
    was, becomes = (abs(predicted_s(plan) - trial["step_time_s"]) for plan in (before, after))
    assert becomes < was


def test_plans_and_campaigns_may_leave_knowledge_out_and_name_what_they_start_from(
    measured: Api,
) -> None:
    for number, (changes, num_known) in enumerate(
        (({}, 1), ({"knowledge": "none"}, 0), ({"knowledge": "none", "start_from": ["first"]}, 1))
    ):
        knowledge = measured.post("/plans", {**CAMPAIGN, **changes})["knowledge"]
        assert knowledge["num_measurements"] == num_known, changes
        assert measured.submit(name=f"c{number}", **changes)["starts_from"] == num_known, changes


def test_a_report_has_the_days_of_a_training_job_where_its_tokens_are_stated(
    measured: Api,
) -> None:
    (trial,) = measured.get("/campaigns/first/leaderboard")["trials"]
    path = "/v1/campaigns/first/report"
    assert "Training job" not in Page(measured.http.get(path).text).text
    page = Page(measured.http.get(f"{path}?tokens=1B&mtbf_hours=5000").text)
    text = " ".join(page.text.split())
    _, is_there, job = text.partition("training job: 1B tokens on the layout's nodes")
    assert is_there
    assert "assumed: a node fails every 5,000 h" in text
    assert "measured" in job
    # The slowdown by failures is below a percent of these days.
    assert f" {1e9 / (8 * 128) * trial['step_time_s'] / 86400:.2g}" in text


def predicted(plan: Any) -> dict[str, float]:
    return {each["layout_key"]: each["predicted"]["step_time_s"] for each in plan["layouts"]}


@pytest.mark.parametrize("max_at_once", [submission.MAX_AT_ONCE, 3], ids=["at once", "driver"])
def test_the_service_plans_for_the_campaigns_trainer_and_compares_two_layouts(
    http: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_at_once: int
) -> None:
    api = Api(http)
    document = {**CAMPAIGN, "probe": {"trainer": "megatron-lm"}, "baseline": LAYOUT.to_mapping()}
    (file := tmp_path / "first.yaml").write_text(yaml.safe_dump(document))
    keys = [each["layout_key"] for each in api.post("/plans", document)["layouts"]][-2:]
    flags = ["--json", "--data-dir", str(tmp_path), "--compare", *keys]
    printed = ends(CliRunner().invoke(plan_command, [str(file), *flags]), 0)
    monkeypatch.setattr(submission, "MAX_AT_ONCE", max_at_once)
    query = "&".join(f"compare={key}" for key in keys)
    planned = api.http.post(f"/v1/plans?{query}", json=document).json()
    if "state" in planned:
        driver, path = Driver(api.store), f"/plans/{planned['id']}"
        wait_until("it is made", lambda: driver.step() and api.get(path)["state"] != "WAITING")
        planned = api.get(path)["plan"]
    assert planned == json.loads(printed.stdout)
    assert planned["trainer"] == "megatron-lm"
    assert planned["baseline"]["planned"]["layout_key"] == LAYOUT.key
    compared = planned["comparison"]
    assert [compared[side]["layout_key"] for side in ("first", "second")] == keys


def test_a_plan_that_was_stored_before_it_named_its_trainer_is_read(api: Api) -> None:
    document = {**CAMPAIGN, "baseline": LAYOUT.to_mapping()}
    planned = api.post("/plans", document)
    for new in ("trainer", "nodes", "baseline", "comparison", "some_fit", "needed"):
        del planned[new]
    for new in ("num_late", "deadline_s", "chance"):
        del planned["budget"][new]
    record = api.store.plans.request(document, PlanOptions())
    plan = PlanRead.of_record(replace(record, state="DONE", answer=planned)).plan
    assert plan is not None
    assert (plan.trainer, plan.baseline) == ("embedded", None)
    assert PlanOptions.from_mapping({"top": 1, "probe_start_s": 5.0, "job": None}).compare is None


def test_keys_that_cannot_be_compared_are_refused(api: Api) -> None:
    answer = api.post("/plans?compare=a&compare=b", CAMPAIGN, status=422)
    assert "'a' is not the key of a layout" in answer["detail"]
    api.post("/plans?compare=a", CAMPAIGN, status=422)


def test_what_a_trainers_campaign_measured_calibrates_the_plans_of_that_trainer(
    http: TestClient,
) -> None:
    api = Api(http)
    probe = {"trainer": "theirs"}
    document = {**CAMPAIGN, "probe": probe}
    before = predicted(api.post("/plans", document))
    campaign = api.submit(probe=probe)
    api.store.trials.add(campaign["id"], LAYOUT)
    worker = api.register("w", trainers={"theirs": "1.2"})
    api.report_measured(worker, api.lease(worker), LAYOUT, **THEIRS)
    api.post("/campaigns/first/cancel")
    planned = api.post("/plans", document)
    assert planned["knowledge"]["num_step_times"] == 1
    next_one = api.store.campaigns.get(api.submit(name="next", probe=probe)["id"])
    (known,) = api.store.plans.known_trials(next_one)
    assert known.software == next_one.stored.software == "theirs", "they are pooled"
    (trial,) = api.get("/campaigns/first/leaderboard")["trials"]
    was, becomes = (
        abs(each[LAYOUT.key] - trial["step_time_s"]) for each in (before, predicted(planned))
    )
    assert becomes < was
    assert api.post("/plans", CAMPAIGN)["knowledge"]["num_measurements"] == 0


def test_an_unknown_trainer_is_warned_of_unless_a_worker_of_the_cluster_lists_it(
    http: TestClient,
) -> None:
    api = Api(http)

    def warned(trainer: str, name: str) -> list[str]:
        document = {**CAMPAIGN, "name": name, "probe": {"trainer": trainer}}
        planned = api.post("/plans", document)["warnings"]
        submitted = api.submit(name=name, probe={"trainer": trainer})["warnings"]
        found = [each for each in submitted if each.startswith("the trainer is none of ")]
        assert found == [each for each in planned if each.startswith("the trainer is none of ")]
        return found

    (warning,) = warned("theirs", "before")
    assert "embedded, megatron-lm, " in warning
    assert "lists 'theirs'" in warning
    assert warned("megatron-lm", "known") == []
    api.register("w", trainers={"theirs": "1.2"})
    assert warned("theirs", "after") == []
    cloned = api.post("/campaigns/before/clone", {}, status=201)["warnings"]
    assert not any(each.startswith("the trainer is none of ") for each in cloned)
    read = api.get("/campaigns/before")["warnings"]
    assert [each for each in read if "none of" in each] == [warning], "stored ones stay"


def test_a_plan_of_jobs_says_what_each_value_of_a_knob_brings(api: Api) -> None:
    space = {**space_of(), "job": {"compile": [False, True]}}
    document = {**CAMPAIGN, "model": "tiny-llama", "space": space}
    planned = api.post("/plans", document)
    assert planned["num_jobs"] == 2 * planned["num_legal"]
    (gain,) = planned["knobs"]
    assert (gain["knob"], gain["value"], gain["reference"]) == ("compile", True, False)
    assert gain["step_ratio_low"] < gain["step_ratio"] < 1.0
    first = planned["layouts"][0]
    assert first["layout"]["job"] == {"compile": True}
    keys = (first["layout_key"].removesuffix("~compile.true"), first["layout_key"])
    compared = api.post(f"/plans?compare={keys[0]}&compare={keys[1]}", document)["comparison"]
    assert [each["knob"] for each in compared["changes"]] == ["compile"]

"""Plans by the service: the same as on the command line, with what the database knows."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from fastapi.testclient import TestClient

from api.campaigns import submission
from search_spaces.belief.plan import make_plan
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.spec.layout import Layout
from search_spaces.statistics.job_duration import TrainingJob
from tests.kit.api import CAMPAIGN, CLUSTER, Api
from tests.kit.campaigns import space_of
from tests.kit.page import Page
from tests.kit.waiting import wait_until
from tuner.driver.driver import Driver
from tuner.estimate.plan_command import plan as plan_command

LAYOUT = Layout(tp=2, num_microbatches=8)


def as_json(plan: Any) -> Any:
    return json.loads(json.dumps(asdict(plan)))


def test_a_plan_is_the_document_that_the_command_prints(api: Api, tmp_path: Path) -> None:
    file = tmp_path / "first.yaml"
    file.write_text(yaml.safe_dump(CAMPAIGN))
    flags = ["--json", "--tokens", "1M", "--nodes", "1", "--data-dir", str(tmp_path)]
    printed = CliRunner().invoke(plan_command, [str(file), *flags])
    assert printed.exit_code == 0, printed.output
    planned = api.post("/plans?tokens=1M&nodes=1", CAMPAIGN)
    assert planned == json.loads(printed.stdout)
    assert planned["knowledge"]["basis"] == "data sheets"
    assert planned["layouts"][0]["job"]["duration"]["num_steps"] > 1


def test_the_query_has_the_number_of_layouts_and_the_job(api: Api) -> None:
    planned = api.post("/plans?top=2&probe_start_s=5&tokens=2e6&mtbf_hours=100", CAMPAIGN)
    job = TrainingJob(tokens=2_000_000, mtbf_hours=100.0)
    expected = make_plan(CampaignSpec.from_document(CAMPAIGN), top=2, probe_start_s=5.0, job=job)
    assert planned == as_json(expected)


def test_a_plan_is_read_from_yaml_names_a_users_cluster_and_stores_nothing(
    http: TestClient, api: Api
) -> None:
    yaml_type = {"Content-Type": "application/yaml"}
    answer = http.post("/v1/plans", content=yaml.safe_dump(CAMPAIGN), headers=yaml_type)
    assert answer.json() == api.post("/plans", CAMPAIGN)

    api.http.put("/v1/clusters/ours", json={**CLUSTER, "name": "ours"})
    assert api.post("/plans", {**CAMPAIGN, "cluster": "ours"})["cluster"] == "ours"

    assert api.get("/campaigns")["campaigns"] == []


def test_a_plan_uses_and_names_the_measurements_of_the_service(api: Api) -> None:
    before = api.post("/plans", CAMPAIGN)
    api.submit()
    worker = api.register()
    api.complete(worker, "first", LAYOUT)
    assert api.post("/plans", CAMPAIGN)["knowledge"]["num_measurements"] == 0, "it has not ended"
    api.post("/campaigns/first/cancel")

    after = api.post("/plans", CAMPAIGN)
    used = after["knowledge"]
    assert (used["basis"], used["num_measurements"], used["num_step_times"]) == (
        "measurements",
        1,
        1,
    )
    assert (used["models"], used["clusters"]) == (["tiny"], ["local-cpu"])
    (trial,) = api.get("/campaigns/first/trials")["trials"]
    measured_s = trial["measurement"]["step_time_s"]
    was, becomes = (
        next(each for each in plan["layouts"] if each["layout_key"] == LAYOUT.key)["predicted"]
        for plan in (before, after)
    )
    assert abs(becomes["step_time_s"] - measured_s) < abs(was["step_time_s"] - measured_s)
    none = api.post("/plans", {**CAMPAIGN, "knowledge": "none"})
    assert none["knowledge"]["num_measurements"] == 0
    named = api.post("/plans", {**CAMPAIGN, "knowledge": "none", "start_from": ["first"]})
    assert named["knowledge"]["num_measurements"] == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "gpt-0"}, "body.model"),
        ({"start_from": ["nobody"]}, "body.start_from"),
        ({"space": space_of(global_batch_size=7, dp=2)}, "global_batch excludes 1"),
    ],
)
def test_a_plan_is_refused_like_a_submission(api: Api, changes: dict[str, Any], says: str) -> None:
    planned = api.post("/plans", {**CAMPAIGN, **changes}, status=422)
    submitted = api.post("/campaigns", {**CAMPAIGN, **changes}, status=422)
    assert planned["detail"] == submitted["detail"]
    assert planned.get("errors") == submitted.get("errors")
    assert says in str(planned)


def test_the_driver_makes_the_plans_of_a_large_space_at_most_eight_at_once(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = api.post("/plans?top=2&probe_start_s=5&tokens=1M", CAMPAIGN)
    monkeypatch.setattr(submission, "MAX_AT_ONCE", 3)
    answer = api.http.post("/v1/plans?top=2&probe_start_s=5&tokens=1M", json=CAMPAIGN)
    assert answer.status_code == 202, answer.text
    waiting = answer.json()
    assert (waiting["state"], waiting["plan"]) == ("WAITING", None)
    path = f"/plans/{waiting['id']}"
    assert answer.headers["Location"] == f"/v1{path}"
    assert api.get(path) == waiting

    driver = Driver(api.store)
    wait_until(
        "the driver has made it", lambda: driver.step() and api.get(path)["state"] != "WAITING"
    )
    done = api.get(path)
    assert (done["state"], done["problem"]) == ("DONE", "")
    assert done["plan"] == expected
    assert api.get("/campaigns")["campaigns"] == []

    for _ in range(8):
        api.post("/plans", CAMPAIGN, status=202)
    assert "8 plans wait for the driver" in api.post("/plans", CAMPAIGN, status=409)["detail"]


def test_a_plan_for_the_driver_is_refused_like_a_submission(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submission, "MAX_AT_ONCE", 3)
    small = {**CLUSTER, "device_memory_bytes": 1 << 20}
    for changes in ({"start_from": ["nobody"]}, {"cluster": small}):
        planned = api.post("/plans", {**CAMPAIGN, **changes}, status=422)
        submitted = api.post("/campaigns", {**CAMPAIGN, **changes}, status=422)
        assert planned["detail"] == submitted["detail"]
    assert api.store.plans.next_open() is None


def test_a_report_has_the_training_job_with_measured_step_times(api: Api) -> None:
    api.submit()
    worker = api.register()
    api.complete(worker, "first", LAYOUT)
    assert "Training job" not in Page(api.http.get("/v1/campaigns/first/report").text).text
    page = Page(api.http.get("/v1/campaigns/first/report?tokens=1B&mtbf_hours=5000").text)
    (trial,) = api.get("/campaigns/first/leaderboard")["trials"]
    # The slowdown by failures is below a percent of these days.
    days = 1e9 / (8 * 128) * trial["step_time_s"] / 86400
    text = " ".join(page.text.split())
    assert "training job: 1B tokens on the layout's nodes" in text
    assert "assumed: a node fails every 5,000 h" in text
    assert "measured" in text.partition("training job: 1B tokens")[2]
    assert f" {days:.2g}" in text

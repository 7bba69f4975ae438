"""Campaigns: submitted, listed, followed, and what a worker is asked to run of them."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from search_spaces.spec.layout import Layout
from tests.kit.api import CAMPAIGN, Api, measured_as_asked
from tests.kit.store import failed, make_iterations

YAML = {"Content-Type": "application/yaml"}
GUESSED = {"name": "mine", "devices_per_node": 4}


@pytest.fixture(scope="module")
def api(module_api: Api) -> Api:
    return module_api


def names(api: Api, **query: Any) -> list[str]:
    return [campaign["name"] for campaign in api.get("/campaigns", **query)["campaigns"]]


def progress(api: Api, campaign: str = "first") -> Any:
    return api.get(f"/campaigns/{campaign}")["progress"]


def test_a_campaign_is_submitted_as_json_as_yaml_and_again_as_it_was_resolved(api: Api) -> None:
    created = api.submit(name="json")
    assert (created["name"], created["state"]) == ("json", "RUNNING")
    assert (created["num_legal_layouts"], created["progress"]["trials_planned"]) == (4, 4)
    assert created["spec"]["model"]["num_layers"] == 4
    assert api.get("/campaigns/json")["id"] == created["id"]
    assert api.get(f"/campaigns/{created['id']}")["name"] == "json"
    again = api.post("/campaigns", {**created["spec"], "name": "again"}, status=201)
    assert again["spec"] == {**created["spec"], "name": "again"}

    text = yaml.safe_dump({**CAMPAIGN, "name": "yaml"})
    answer = api.http.post("/v1/campaigns", content=text, headers=YAML)
    assert answer.status_code == 201, answer.text
    assert answer.headers["Location"] == "/v1/campaigns/yaml"
    assert answer.json()["spec"] == {**created["spec"], "name": "yaml"}
    # It is stored with the precision of its cluster, and with a warning of what was guessed of it.
    assert created["spec"]["space"]["precision"] == "fp32"
    of_cluster, few = api.submit(name="guessed", cluster=GUESSED)["warnings"]
    assert "mine" in of_cluster
    assert few.startswith("the space has few layouts: 4 of 4")


def test_campaigns_are_listed_in_pages_and_found_by_each_of_their_features(api: Api) -> None:
    model = {"preset": "tiny", "name": "listed"}
    api.submit(name="sweep-1", model=model)
    api.submit(name="Sweep-2", model=model, strategy="exhaustive")
    api.submit(name="both", model=model, objective=["tokens_per_s", "memory_headroom"])
    api.post("/campaigns/both/pause")
    listed: dict[str, Any] = {"model": "listed", "limit": 2}
    first = api.get("/campaigns", **listed)
    second = api.get("/campaigns", **listed, cursor=first["next_cursor"])
    found = [campaign["name"] for page in (first, second) for campaign in page["campaigns"]]
    assert found == ["both", "Sweep-2", "sweep-1"]
    assert second["next_cursor"] is None
    assert api.get("/campaigns", model="listed", limit=3)["next_cursor"] is None, "it is full"

    assert names(api, name_contains="SWEEP") == ["Sweep-2", "sweep-1"]
    assert names(api, model="listed", strategy="exhaustive") == ["Sweep-2"]
    assert names(api, model="listed", objective="memory_headroom") == ["both"]
    assert names(api, model="listed", cluster="local-cpu", state="PAUSED") == ["both"]
    assert names(api, created_after="2999-01-01T00:00:00+02:00") == []
    assert names(api, created_by="nobody") == []


def test_a_worker_is_asked_what_was_submitted_and_its_outcome_is_kept_in_full(api: Api) -> None:
    probe = {"warmup": 3, "iterations": 3, "deadline_s": 60}
    created = api.submit(name="asked", budget={"trials": 3}, seed=7, probe=probe)
    worker = api.register()
    layout = Layout(pp=2, num_microbatches=8)
    trial = api.store.trials.add(created["id"], layout)
    lease = api.lease(worker)
    request = lease["request"]
    assert (request["layout"], request["model"]) == (layout.to_mapping(), created["spec"]["model"])
    assert (request["seed"], request["warmup"], request["iterations"]) == (7, 3, 3)
    assert request["memory_limit_bytes"] == 8 << 30

    slow, fast = (
        {"tokens_per_s": rate, "iterations": make_iterations(8 * 128 / rate, warmup=3, timed=3)}
        for rate in (100.0, 300.0)
    )
    sent = measured_as_asked(lease, layout, **slow)
    assert api.report(worker, lease, sent)["accepted"]
    read = api.get(f"/trials/{trial.id}")
    assert sent.measurement is not None
    assert [i["loss"] for i in read["iterations"]] == [i.loss for i in sent.measurement.iterations]
    assert read["measurement"]["peak_memory_bytes_by_stage"] == [5 << 30, (5 << 30) - 1]
    assert (read["environment"]["git_revision"], read["log_tail"]) == ("abc", "the last line\n")
    assert read["attempts"][0]["worker_name"] == "w1"
    assert read["layout"] == layout.to_mapping(every_knob=True)

    api.complete(worker, "asked", Layout(tp=2, num_microbatches=8), **fast)
    told = progress(api, "asked")
    assert (told["trials"]["COMPLETED"], told["trials_ended"], told["trials_planned"]) == (2, 2, 3)
    assert (told["best"], told["best_trial"], told["seconds_left"]) == (300.0, 2, None)
    assert told["best_layout"].startswith("n1-tp2")
    api.post("/campaigns/asked/cancel")
    assert progress(api, "asked")["seconds_left"] == 0
    api.submit(name="timed", budget={"wall_time_s": 600})
    assert progress(api, "timed")["seconds_left"] == pytest.approx(600, abs=30)


def test_a_campaign_says_what_it_waits_for(api: Api) -> None:
    cluster = {**CAMPAIGN["cluster"], "name": "here"}
    campaign = api.submit(name="waits", cluster=cluster)

    def why() -> str | None:
        reason: str | None = progress(api, "waits")["waiting_reason"]
        return reason

    assert "no driver is at work" in (why() or "")
    api.store.driver.acquire()
    api.register("other", cluster="elsewhere")
    assert "no worker of cluster here" in (why() or "")
    api.register("small", cluster="here", devices_per_node=1)
    trial = api.store.trials.add(campaign["id"], Layout(tp=2, num_microbatches=8))
    assert "needs 2 devices on 1 node," in (why() or "")
    assert "(small) has 1 node of 1 device" in (why() or "")

    worker = api.register("large", cluster="here")
    assert why() is None
    lease = api.lease(worker)
    assert lease["trial_id"] == trial.id
    assert why() is None, "its trial runs"
    api.report(worker, lease, failed())
    api.post("/campaigns/waits/pause")
    assert "paused" in (why() or "")

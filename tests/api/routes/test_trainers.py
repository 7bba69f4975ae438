"""Campaigns of other trainers over HTTP, in the terminal and on the pages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.client.errors import ServiceError
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, CLUSTER, Api, Command, client_of, ends
from tests.kit.store import make_measurement

LAYOUT = Layout(num_microbatches=8)
PROBE: dict[str, Any] = {"trainer": "theirs", "parameters": {"rate": 0.1}}
WORDS = "theirs 1.2, tokens assumed from the layout, not counted"
THEIRS: dict[str, Any] = {
    "trainer": "theirs",
    "trainer_version": "1.2",
    "tokens": "assumed",
    "memory_kind": "sampled",
    "peak_memory_bytes_by_stage": (),
    "breakdown": None,
    "iterations": tuple(
        replace(each, loss=None, grad_norm=None) for each in make_measurement().iterations
    ),
}


@pytest.fixture(scope="module")
def ranked(api: Api) -> Any:
    """The row of the only trial that their trainer has measured."""
    campaign = api.submit(probe=PROBE)
    api.store.trials.add(campaign["id"], LAYOUT)
    worker = api.register("right", trainers={"theirs": "1.2"})
    api.report_measured(worker, api.lease(worker), LAYOUT, **THEIRS)
    (row,) = api.get("/campaigns/first/leaderboard")["trials"]
    return row


def test_a_campaign_waits_for_a_worker_with_its_trainer(api: Api) -> None:
    campaign = api.submit(name="waits", probe=PROBE, cluster={**CLUSTER, "name": "waits"})
    api.store.trials.add(campaign["id"], LAYOUT)
    api.register("plain", cluster="waits")
    read = api.get("/campaigns/waits")
    assert read["trainer"] == "theirs"
    assert "lists the trainer 'theirs'" in read["progress"]["waiting_reason"]
    assert "worker --trainers FILE" in read["progress"]["waiting_reason"]
    worker = api.register("fitting", cluster="waits", trainers={"theirs": "1.2"})
    assert "lists" not in (api.get("/campaigns/waits")["progress"]["waiting_reason"] or "")
    assert api.lease(worker)["request"].items() >= PROBE.items()


def test_measurements_name_their_trainer_everywhere(
    api: Api, command: Command, ranked: Any
) -> None:
    figures = ranked["measurement"]
    assert (figures["trainer"], figures["tokens"]) == ("theirs", "assumed")
    exported = api.get("/campaigns/first/exports", format="command")
    for shown, expected in (
        (command("leaderboard", "first").output, f"measured by the trainer {WORDS}"),
        (command("trial", "show", str(ranked["id"])).output, WORDS),
        (command("leaderboard", "first", "--csv").output, "campaign first with theirs"),
        (exported["files"][0]["content"], f"by the trainer {WORDS}"),
        (
            exported["files"][0]["content"],
            "measured with the trainer theirs; this file is for command, whose step and memory may "
            "differ if it is another program",
        ),
        (command("campaign", "show", "first").output, "trainer       theirs"),
        (api.http.get("/campaigns/first").text, f"Measured by the trainer {WORDS}."),
        (api.http.get("/v1/campaigns/first/report").text, WORDS),
        (api.http.get(f"/trials/{ranked['id']}").text, WORDS),
    ):
        assert expected in shown


def test_the_page_of_a_trial_has_what_its_trainer_reported_and_says_what_not(
    api: Api, ranked: Any
) -> None:
    page = api.http.get(f"/trials/{ranked['id']}").text
    assert "--trainers trainers.yaml --trainer theirs --parameter rate=0.1" in page
    assert "Peak memory by pipeline stage" not in page, "the estimate is of the embedded trainer"
    assert "not reported" in page, "losses and gradient norms"
    assert "sampled" in page


DECLARED: dict[str, Any] = {
    "learning_rate": {"type": "float", "minimum": 0.001, "maximum": 0.1, "default": 0.01},
    "schedule": {"type": "choice", "choices": ["cosine", "linear"], "default": "cosine"},
    "steps": {"type": "int", "minimum": 1},
    "tag": {"type": "text", "pattern": "[a-z-]+", "default": "none"},
    "data": {"type": "path", "below": "/data", "default": "c4"},
}


class Users:
    """Workers and campaigns of a cluster, with the trainer `theirs`."""

    def __init__(self, api: Api, cluster: str) -> None:
        self.api, self.cluster = api, cluster

    def document(self, **parameters: Any) -> dict[str, Any]:
        probe = {"trainer": "theirs", "parameters": parameters}
        cluster = {**CLUSTER, "name": self.cluster}
        return {**CAMPAIGN, "name": self.cluster, "cluster": cluster, "probe": probe}

    def offer(self, name: str = "w1", **changes: Any) -> str:
        """Registers a worker."""
        body = {"trainers": {"theirs": "1"}, "trainer_parameters": {"theirs": DECLARED}}
        return self.api.register(name, **{"cluster": self.cluster, **body, **changes})

    def leave(self, worker: str) -> None:
        assert self.api.http.delete(f"/v1/workers/{worker}").status_code == 204

    def unchecked(self, **changes: Any) -> list[str]:
        """The warnings about parameters of a clone."""
        made = self.api.post(f"/campaigns/{self.cluster}/clone", changes, status=201)
        return [each for each in made["warnings"] if "parameters" in each]


def test_all_wrong_parameters_are_reported_together_wherever_a_campaign_is_written(
    api: Api, command: Command, tmp_path: Path
) -> None:
    users = Users(api, "together")
    users.offer()
    wrong = users.document(lerning_rate=0.1, schedule="step")
    fields = [f"body.probe.parameters.{name}" for name in ("lerning_rate", "schedule", "steps")]
    answer = api.post("/campaigns", wrong, status=422)
    assert [each["field"] for each in answer["errors"]] == fields
    (unknown, *_) = answer["errors"]
    assert unknown["message"].startswith("unknown parameter 'lerning_rate' (did you mean 'learni")
    api.post("/plans", wrong, status=422)
    right = api.post("/campaigns", users.document(steps=4), status=201)
    assert not any("parameters" in each for each in right["warnings"])
    api.post("/campaigns/together/clone", {"probe": wrong["probe"]}, status=422)
    (file := tmp_path / "wrong.json").write_text(json.dumps(wrong))
    says = "probe.parameters.schedule: 'step' is not one of cosine, linear"
    for options in (["--dry-run"], []):
        refused = command("campaign", "submit", str(file), *options)
        ends(refused, 2, "unknown parameter 'lerning_rate'", says)
    with pytest.raises(ServiceError, match="did you mean 'learning_rate'"):
        client_of(api).create_campaign(wrong)
    form = {"view": "yaml", "yaml": json.dumps(wrong), "do": "", "key": "k"}
    checked = api.http.post("/submit/check", data=form)
    assert "did you mean &#39;learning_rate&#39;?" in checked.text


def test_parameters_that_no_worker_has_described_are_accepted_with_a_warning(
    api: Api, command: Command, tmp_path: Path
) -> None:
    users = Users(api, "lonely")
    (file := tmp_path / "first.json").write_text(json.dumps(users.document(anything=1)))
    nobody = (
        "the parameters of the trainer theirs could not be checked: no worker of cluster lonely "
        "with it has registered yet; a wrong one fails each trial"
    )
    submitted = ends(command("campaign", "submit", str(file)), 0)
    assert f"warning: {nobody}" in submitted.stderr
    assert nobody in api.get("/campaigns/lonely")["warnings"]
    form = {"view": "yaml", "yaml": file.read_text(), "do": "", "key": "k"}
    assert nobody in api.http.post("/submit/check", data=form).text
    users.offer("elsewhere", cluster="another")
    users.offer("other", trainers={"ours": "1"}, trainer_parameters={"ours": {}})
    assert users.unchecked() == [nobody]
    users.offer("old", trainer_parameters={})
    (silent,) = users.unchecked()
    assert "a worker of cluster lonely does not report what it accepts" in silent
    users.offer("new")
    probe = {"trainer": "theirs", "parameters": {"steps": 3}}
    assert users.unchecked(probe=probe) == [], "a worker accepts them"
    assert users.unchecked() == [silent], "one refuses them, and the other does not say"
    unset = users.unchecked(probe={"trainer": "theirs"})
    assert unset == [], "there is nothing that could be wrong"


def test_live_workers_decide_and_without_one_the_last_that_had_the_trainer(api: Api) -> None:
    users = Users(api, "changing")
    more = {"theirs": DECLARED | {"beta": {"type": "float", "default": 0.9}}}
    few = users.offer("few")
    many = users.offer("many", trainer_parameters=more)
    document = users.document(steps=1, beta=0.8)
    api.post("/plans", document)
    for worker in (many, few):
        users.leave(worker)
    api.post("/plans", document)
    few = users.offer("few")
    api.post("/plans", document, status=422)
    users.offer("none", trainer_parameters={"theirs": {}})
    users.leave(few)
    answer = api.post("/plans", document, status=422)
    assert "there are none to choose from" in answer["errors"][0]["message"]

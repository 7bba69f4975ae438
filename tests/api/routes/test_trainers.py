"""Campaigns of other trainers over HTTP, in the terminal and on the pages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from api.errors import ServiceError
from search_spaces.spec.layout import Layout
from tests.kit.api import CAMPAIGN, INTRODUCTION, Api, Command, client_of
from tests.kit.store import make_measurement

LAYOUT = Layout(num_microbatches=8)
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


@pytest.fixture
def measured(api: Api) -> Api:
    api.submit(probe={"trainer": "theirs", "parameters": {"rate": 0.1}})
    worker = api.register(trainers={"theirs": "1.2"})
    api.store.trials.add(api.store.campaigns.by_name("first").id, LAYOUT)
    lease = api.lease(worker)
    assert lease["request"]["trainer"] == "theirs"
    assert lease["request"]["parameters"] == {"rate": 0.1}
    api.report_measured(worker, lease, LAYOUT, **THEIRS)
    return api


def test_a_campaign_says_that_no_worker_lists_its_trainer(api: Api) -> None:
    api.submit(probe={"trainer": "theirs"})
    api.store.trials.add(api.store.campaigns.by_name("first").id, LAYOUT)
    api.register("plain")
    read = api.get("/campaigns/first")
    assert read["trainer"] == "theirs"
    assert "lists the trainer 'theirs'" in read["progress"]["waiting_reason"]
    assert "worker --trainers FILE" in read["progress"]["waiting_reason"]
    api.register("right", trainers={"theirs": "1.2"})
    assert "lists" not in (api.get("/campaigns/first")["progress"]["waiting_reason"] or "")


def test_measurements_show_their_trainer_everywhere(measured: Api, command: Command) -> None:
    words = "theirs 1.2, tokens assumed from the layout, not counted"
    (ranked,) = measured.get("/campaigns/first/leaderboard")["trials"]
    figures = ranked["measurement"]
    assert (figures["trainer"], figures["tokens"]) == ("theirs", "assumed")
    assert f"measured by the trainer {words}" in command("leaderboard", "first").output
    assert words in command("trial", "show", str(ranked["id"])).output
    assert f"Measured by the trainer {words}." in measured.http.get("/campaigns/first").text
    page = measured.http.get(f"/trials/{ranked['id']}").text
    assert "--trainers trainers.yaml --trainer theirs --parameter rate=0.1" in page
    assert "Peak memory by pipeline stage" not in page, "the estimate is of the embedded trainer"
    assert words in page
    assert "not reported" in page, "losses and gradient norms"
    assert "sampled" in page
    text = command("leaderboard", "first", "--csv").output
    assert "layout-tuner campaign first with theirs" in text
    exported = measured.get("/campaigns/first/exports", format="command")
    assert f"by the trainer {words}" in exported["files"][0]["content"]
    report = measured.http.get("/v1/campaigns/first/report")
    assert words in report.text


RATE = {"type": "float", "minimum": 0.001, "maximum": 0.1, "default": 0.01}
DECLARED: dict[str, Any] = {
    "learning_rate": RATE,
    "schedule": {"type": "choice", "choices": ["cosine", "linear"], "default": "cosine"},
    "steps": {"type": "int", "minimum": 1},
    "tag": {"type": "text", "pattern": "[a-z-]+", "default": "none"},
    "data": {"type": "path", "below": "/data", "default": "c4"},
}


def with_parameters(**parameters: Any) -> dict[str, Any]:
    return {**CAMPAIGN, "probe": {"trainer": "theirs", "parameters": parameters}}


def unchecked(campaign: dict[str, Any]) -> list[str]:
    """The warnings about parameters."""
    return [each for each in campaign["warnings"] if "parameters" in each]


def clone(api: Api, **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = api.post("/campaigns/first/clone", changes, status=201)
    return made


def offer(api: Api, name: str = "w1", **changes: Any) -> str:
    body = {"trainers": {"theirs": "1"}, "trainer_parameters": {"theirs": DECLARED}}
    return api.register(name, **{**body, **changes})


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        (
            {"lerning_rate": 0.1},
            "unknown parameter 'lerning_rate' (did you mean 'learning_rate'?); "
            "choose from learning_rate, schedule, steps, tag, data",
        ),
        ({"learning_rate": 0.5}, "0.5 is not from 0.001 to 0.1"),
        ({"learning_rate": "fast"}, "'fast' is not a finite number"),
        ({"schedule": "step"}, "'step' is not one of cosine, linear"),
        ({"steps": 1.5}, "1.5 is not a whole number"),
        ({"tag": "A"}, "'A' does not match [a-z-]+"),
        ({"data": "../x"}, "'../x' is not a path below /data, without .."),
        ({"steps": ...}, "the parameter has no default, and is missing"),
    ],
)
def test_a_wrong_parameter_is_refused_at_submission(
    api: Api, parameters: dict[str, Any], why: str
) -> None:
    offer(api)
    given = {name: value for name, value in ({"steps": 4} | parameters).items() if value != ...}
    (said,) = api.post("/campaigns", with_parameters(**given), status=422)["errors"]
    assert said["field"] == f"body.probe.parameters.{next(iter(parameters))}"
    assert why in said["message"]
    assert api.get("/campaigns")["campaigns"] == []
    assert unchecked(api.post("/campaigns", with_parameters(steps=4), status=201)) == []


def test_all_wrong_parameters_are_reported_together_wherever_a_campaign_is_written(
    api: Api, command: Command, tmp_path: Path
) -> None:
    offer(api)
    wrong = with_parameters(lerning_rate=0.1, schedule="step")
    answer = api.post("/campaigns", wrong, status=422)
    assert [each["field"] for each in answer["errors"]] == [
        f"body.probe.parameters.{name}" for name in ("lerning_rate", "schedule", "steps")
    ]
    api.post("/plans", wrong, status=422)
    api.submit()
    api.post("/campaigns/first/clone", {"probe": wrong["probe"]}, status=422)
    (file := tmp_path / "wrong.json").write_text(json.dumps(wrong))
    for options in (["--dry-run"], []):
        refused = command("campaign", "submit", str(file), *options)
        assert refused.exit_code == 1
        assert "unknown parameter 'lerning_rate'" in refused.stderr
        assert "probe.parameters.schedule: 'step' is not one of cosine, linear" in refused.stderr
    with pytest.raises(ServiceError, match="did you mean 'learning_rate'"):
        client_of(api).create_campaign(wrong)
    form = {"view": "yaml", "yaml": json.dumps(wrong), "do": "", "key": "k"}
    checked = api.http.post("/submit/check", data=form)
    assert "did you mean &#39;learning_rate&#39;?" in checked.text


def test_parameters_that_no_worker_has_described_are_accepted_with_a_warning(
    api: Api, command: Command, tmp_path: Path
) -> None:
    (file := tmp_path / "first.json").write_text(json.dumps(with_parameters(anything=1)))
    nobody = (
        "the parameters of the trainer theirs could not be checked: no worker of cluster local-cpu "
        "with it has registered yet; a wrong one fails each trial"
    )
    submitted = command("campaign", "submit", str(file))
    assert submitted.exit_code == 0
    assert f"warning: {nobody}" in submitted.stderr
    assert unchecked(api.get("/campaigns/first")) == [nobody]
    form = {"view": "yaml", "yaml": file.read_text(), "do": "", "key": "k"}
    assert nobody in api.http.post("/submit/check", data=form).text
    offer(api, "elsewhere", cluster="another")
    offer(api, "other", trainers={"ours": "1"}, trainer_parameters={"ours": {}})
    assert unchecked(clone(api)) == [nobody]
    offer(api, "old", trainer_parameters={})
    (silent,) = unchecked(clone(api))
    assert "a worker of cluster local-cpu does not report what it accepts" in silent
    probe = {"trainer": "theirs", "parameters": {"steps": 3}}
    offer(api, "new")
    assert unchecked(clone(api, probe=probe)) == [], "a worker accepts them"
    assert unchecked(clone(api)) == [silent], "one refuses them, and the other does not say"
    unset = clone(api, probe={"trainer": "theirs"})
    assert unchecked(unset) == [], "there is nothing that could be wrong"


def test_live_workers_decide_and_without_one_the_last_that_had_the_trainer(api: Api) -> None:
    more = {"theirs": DECLARED | {"beta": {"type": "float", "default": 0.9}}}
    few = offer(api, "few")
    many = offer(api, "many", trainer_parameters=more)
    document = with_parameters(steps=1, beta=0.8)
    api.post("/plans", document)
    for worker in (many, few):
        assert api.http.delete(f"/v1/workers/{worker}").status_code == 204
    api.post("/plans", document)
    few = offer(api, "few")
    api.post("/plans", document, status=422)
    offer(api, "none", trainer_parameters={"theirs": {}})
    assert api.http.delete(f"/v1/workers/{few}").status_code == 204
    answer = api.post("/plans", document, status=422)
    assert "there are none to choose from" in answer["errors"][0]["message"]


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"rate": {"type": "number"}}, "'number' is unknown"),
        ({"rate": 3}, "a parameter is 3, not a mapping"),
        ({"tag": {"type": "text", "pattern": "(a+)+"}}, "may take long to match"),
        ({"tag": {"type": "text", "pattern": "a{99999999999999999999}"}}, "regular expression"),
        ({"tag": {"type": "text", "pattern": "("*9999 + ")"*9999}}, "regular expression"),
        ({"tag": {"type": "text", "pattern": "\u202e"}}, "not one line"),
        ({"kind": {"type": "choice", "choices": ["\u202e"]}}, "kind.choices"),
        ({"kind": {"type": "text", "pattern": ".*", "default": "\0"}}, "kind.default"),
        ({"kind": {"type": "path", "below": "/\x1b"}}, "kind.below"),
        ({"\x1b": RATE}, "not a name of small letters"),
        ({f"p{n}": RATE for n in range(33)}, "33 are more than 32"),
    ],
)  # fmt: skip
def test_a_worker_with_declarations_that_cannot_be_is_refused(
    api: Api, declared: Any, why: str
) -> None:
    body = {**INTRODUCTION, "trainer_parameters": {"theirs": declared}}
    assert why in json.dumps(api.post("/workers", body, status=422))

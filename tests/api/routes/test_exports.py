"""Exports over HTTP: which trial, and on more nodes. The golden documents have the files."""

from __future__ import annotations

import json
from typing import Any

import pytest

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.exports.export import FORMATS
from tests.kit.api import CLUSTER, Api
from tests.kit.store import failed

SPACE = {"global_batch_size": 8, "tp": [1, 2, 4], "pp": 1, "dp": [1, 2]}
PLAIN = Layout(tp=2, dp=2, micro_batch_size=1, num_microbatches=4)


@pytest.fixture(scope="module")
def api(module_api: Api) -> Api:
    """A campaign on one node: trial 2 is the best, and 3 has run out of memory."""
    campaign = module_api.submit(space=SPACE, cluster={**CLUSTER, "num_nodes": 1})
    worker = module_api.register()
    for layout, rate in ((PLAIN, 1000.0), (Layout(num_microbatches=8), 2e3)):
        module_api.complete(worker, "first", layout, tokens_per_s=rate)
    module_api.store.trials.add(campaign["id"], Layout(tp=4, num_microbatches=8))
    module_api.report(worker, module_api.lease(worker), failed("out_of_memory"))
    return module_api


def exported(api: Api, format_name: str, campaign: str = "first", **query: Any) -> Any:
    return api.get(f"/campaigns/{campaign}/exports", format=format_name, **query)


def test_the_best_trial_is_exported_unless_another_is_named_that_has_completed(api: Api) -> None:
    listed = api.get("/exports/formats")["formats"]
    assert [each["name"] for each in listed] == list(FORMATS)
    assert all(each["target_version"] and each["needs"] for each in listed)
    best = exported(api, "trainer")
    assert (best["format"], best["trial"], bool(best["target_version"])) == ("embedded", 2, True)
    assert [file["name"] for file in best["files"]] == ["job.json"]
    problem = exported(api, "trainer", trial=3, status=409)
    assert problem["type"].endswith(":export-unavailable")
    assert "trial 3 of campaign 'first' is INFEASIBLE (out_of_memory)" in problem["detail"]
    api.submit(name="compiled", probe={"compile": True})
    assert "no ranked trial" in exported(api, "trainer", "compiled", status=409)["detail"]
    worker = api.register()
    layouts = (Layout(num_microbatches=8), Layout(tp=2, num_microbatches=8))
    short = {"shortened": True, "iterations_asked": 10}
    api.complete(worker, "compiled", layouts[0], **short)
    exported(api, "trainer", "compiled", status=409)
    api.complete(worker, "compiled", layouts[1])
    (file,) = exported(api, "trainer", "compiled")["files"]
    assert json.loads(file["content"])["compile"] is True


def test_a_scaled_export_says_that_it_was_not_measured(api: Api) -> None:
    bundle = exported(api, "megatron-lm", trial=1, nodes=2)
    (script,) = [file["content"] for file in bundle["files"] if file["executable"]]
    assert "NUM_NODES=2\nRANKS_PER_NODE=4\n" in script
    assert "--global-batch-size 8" in script
    (note,) = [note for note in bundle["notes"] if note.startswith("scaled from")]
    assert "scaled from 1 node to 2: dp=4 instead of 2, num_microbatches=2 instead of 4" in note
    assert "same global batch of 8" in note
    assert f"# {note}" in script
    assert "which was not measured" in script


@pytest.mark.parametrize(
    ("format_name", "says"),
    [
        ("embedded", "measured with the embedded trainer, which this file is for"),
        ("trainer", "measured with the embedded trainer, which this file is for"),
        (
            "megatron-lm",
            "measured with the embedded trainer; this file is for megatron-lm, whose step and memory "
            "may differ",
        ),
        ("deepspeed", "measured with the embedded trainer; this file is for deepspeed, whose"),
    ],
)
def test_an_export_says_which_trainer_was_measured_and_whether_it_is_for_another(
    api: Api, format_name: str, says: str
) -> None:
    bundle = exported(api, format_name, trial=1)
    assert any(says in note for note in bundle["notes"])
    if bundle["format"] == "megatron-lm":
        (script,) = [file["content"] for file in bundle["files"] if file["executable"]]
        assert f"# {says}" in script


def test_an_export_for_the_nodes_that_were_measured_is_not_scaled(api: Api) -> None:
    same = exported(api, "megatron-lm", trial=1, nodes=1)
    assert same == exported(api, "megatron-lm", trial=1)


def test_an_export_for_nodes_that_the_layout_cannot_have_is_refused_with_the_numbers(
    api: Api,
) -> None:
    problem = exported(api, "embedded", trial=1, nodes=3, status=422)
    assert problem["type"].endswith(":export-impossible")
    why = "global_batch_size=8 is not divisible by dp*micro_batch_size=6*1=6 on num_nodes=3"
    assert why in problem["detail"]

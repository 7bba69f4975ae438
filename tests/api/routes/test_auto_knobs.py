"""Knobs that a document leaves out, from submission to pages and commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.api import INTRODUCTION, Api, Command

DOCUMENT = {
    "name": "first",
    "model": "llama-8b",
    "cluster": {"preset": "h100-sxm", "num_nodes": 8},
    "space": {"global_batch_size": 256, "zero_stage": 1},
    "budget": {"trials": 5},
}


@pytest.fixture(scope="module")
def api(module_api: Api) -> Api:
    module_api.post("/campaigns", DOCUMENT, status=201)
    return module_api


def clone(api: Api, campaign: str = "first", **changes: Any) -> Any:
    return api.post(f"/campaigns/{campaign}/clone", changes, status=201)["spec"]["space"]


def test_absent_knobs_are_resolved_at_submission(api: Api) -> None:
    created = api.get("/campaigns/first")
    space = created["spec"]["space"]
    assert created["num_legal_layouts"] > 100
    assert created["warnings"] == []
    assert (space["num_nodes"], space["zero_stage"], space["precision"]) == ([2, 4, 8], 1, "bf16")
    assert "zero_stage" not in space["auto"]
    assert set(space["auto"]) >= {"num_nodes", "tp", "pp", "precision"}
    planned = api.post("/plans", DOCUMENT)
    assert planned["auto"] == {knob: space[knob] for knob in space["auto"]}


def test_resolved_knobs_are_shown_everywhere(api: Api, command: Command, tmp_path: Path) -> None:
    (file := tmp_path / "first.yaml").write_text(yaml.safe_dump({**DOCUMENT, "name": "second"}))
    form = {"view": "yaml", "yaml": yaml.safe_dump(DOCUMENT)}
    for shown in (
        command("campaign", "show", "first").output,
        command("campaign", "submit", str(file), "--dry-run").output,
        api.http.get("/campaigns/first").text,
        api.http.post("/submit/check", data=form).text,
    ):
        assert "num_nodes 2, 4, 8; tp 1, 2, 4, 8" in " ".join(shown.split())


def test_the_form_of_a_clone_has_the_stated_knobs_alone(api: Api) -> None:
    page = api.http.get("/submit?campaign=first&view=yaml").text
    assert "zero_stage: 1" in page
    assert "recompute" not in page.partition("<textarea")[2].partition("</textarea>")[0]


def test_what_was_resolved_stays_so_except_in_a_clone_on_another_cluster(api: Api) -> None:
    spec = api.get("/campaigns/first")["spec"]
    again = api.post("/campaigns", {**spec, "name": "again"}, 201)["spec"]
    assert again == {**spec, "name": "again"}
    assert clone(api, seed=3) == spec["space"]
    space = clone(api, cluster={"preset": "perlmutter", "num_nodes": 32})
    assert (space["num_nodes"], space["tp"], space["zero_stage"]) == ([8, 16, 32], [1, 2, 4], 1)


def test_a_clone_asks_again_for_what_was_asked(api: Api) -> None:
    asked = {"global_batch_size": 256, "pp": [4, 8], "pipeline_layout": "auto", "num_nodes": 8}
    spec = api.post("/campaigns", {**DOCUMENT, "name": "asked", "space": asked}, 201)["spec"]
    assert "pipeline_layout" in spec["space"]["auto"]
    page = api.http.get("/submit?campaign=asked&view=yaml").text
    assert "pipeline_layout: auto" in page.partition("<textarea")[2].partition("</textarea>")[0]
    space = clone(api, "asked", cluster={"preset": "perlmutter", "num_nodes": 32})
    assert "pipeline_layout" in space["auto"]


def test_a_clone_keeps_a_stated_split_and_resolves_an_automatic_one_again(api: Api) -> None:
    uneven = {"preset": "llama-8b", "num_layers": 30}
    # Every knob is stated, so that nothing is automatic.
    stated = {"global_batch_size": 256, "pp": [2, 4], "pipeline_split": "layers", "tp": 1, "vpp": 1}
    stated |= {"num_nodes": 8, "micro_batch_size": 1, "zero_stage": 0, "zero_replicas": 1}
    stated |= {"recompute": "full", "sequence_parallel": False, "precision": "bf16"}
    document = {**DOCUMENT, "name": "stated", "model": uneven, "space": stated}
    spec = api.post("/campaigns", document, 201)["spec"]
    assert "pipeline_split" not in spec["space"]
    assert clone(api, "stated", seed=3) == spec["space"]
    space = clone(api, model=uneven)
    assert space["pipeline_split"] == ["layers", "embedding_and_head"]
    assert "pipeline_split" in space["auto"]


def test_the_nodes_of_a_whole_machine_are_those_of_the_largest_allocation(api: Api) -> None:
    document = {**DOCUMENT, "name": "whole", "cluster": "frontier", "objective": "tokens_per_s"}
    refused = api.post("/campaigns", document, status=422)
    assert "space.num_nodes" in str(refused["errors"])
    for name, num_nodes in (("w1", 4), ("w2", 16)):
        worker = {**INTRODUCTION, "name": name, "cluster": "frontier", "num_nodes": num_nodes}
        api.post("/workers", {**worker, "devices_per_node": 8}, status=201)
    assert api.post("/campaigns", document, 201)["spec"]["space"]["num_nodes"] == 16

"""Knobs that a document leaves out, from submission to pages and commands."""

from __future__ import annotations

from pathlib import Path

import yaml
from starlette.testclient import TestClient

from tests.kit.api import HEADERS, INTRODUCTION, Api, Command

CLUSTER = {"preset": "h100-sxm", "num_nodes": 8}
DOCUMENT = {
    "name": "first",
    "model": "llama-8b",
    "cluster": CLUSTER,
    "space": {"global_batch_size": 256, "zero_stage": 1},
    "budget": {"trials": 5},
}


def test_absent_knobs_are_resolved_at_submission_and_shown_everywhere(
    http: TestClient, api: Api, command: Command, tmp_path: Path
) -> None:
    created = api.post("/campaigns", DOCUMENT, 201)
    space = created["spec"]["space"]
    assert created["num_legal_layouts"] > 100
    assert created["warnings"] == []
    assert space["num_nodes"] == [2, 4, 8]
    assert space["zero_stage"] == 1
    assert "zero_stage" not in space["auto"]
    assert set(space["auto"]) >= {"num_nodes", "tp", "pp", "precision"}
    words = "num_nodes 2, 4, 8; tp 1, 2, 4, 8"
    shown = command("campaign", "show", "first")
    assert words in " ".join(shown.output.split())
    assert words in http.get("/campaigns/first", headers=HEADERS).text
    check = http.post(
        "/submit/check", data={"view": "yaml", "yaml": yaml.safe_dump(DOCUMENT)}, headers=HEADERS
    )
    assert words in check.text
    planned = api.post("/plans", DOCUMENT)
    assert planned["auto"] == {knob: space[knob] for knob in space["auto"]}
    file = tmp_path / "first.yaml"
    file.write_text(yaml.safe_dump({**DOCUMENT, "name": "second"}))
    dry = command("campaign", "submit", str(file), "--dry-run")
    assert words in " ".join(dry.output.split())


def test_what_was_stored_is_submitted_again_as_it_was(api: Api) -> None:
    spec = api.post("/campaigns", DOCUMENT, 201)["spec"]
    again = api.post("/campaigns", {**spec, "name": "second"}, 201)["spec"]
    assert again == {**spec, "name": "second"}
    clone = api.post("/campaigns/first/clone", {"seed": 3}, status=201)["spec"]
    assert clone["space"] == spec["space"]


def test_a_clone_on_another_cluster_is_resolved_for_that_one(api: Api) -> None:
    api.post("/campaigns", DOCUMENT, 201)
    cluster = {"preset": "perlmutter", "num_nodes": 32}
    space = api.post("/campaigns/first/clone", {"cluster": cluster}, status=201)["spec"]["space"]
    assert (space["num_nodes"], space["tp"], space["zero_stage"]) == ([8, 16, 32], [1, 2, 4], 1)


def test_the_nodes_of_a_whole_machine_are_those_of_the_largest_allocation(api: Api) -> None:
    document = {**DOCUMENT, "cluster": "frontier", "objective": "tokens_per_s"}
    refused = api.post("/campaigns", document, status=422)
    assert "space.num_nodes" in str(refused["errors"])
    for name, num_nodes in (("w1", 4), ("w2", 16)):
        worker = {**INTRODUCTION, "name": name, "cluster": "frontier", "num_nodes": num_nodes}
        api.post("/workers", {**worker, "devices_per_node": 8}, status=201)
    assert api.post("/campaigns", document, 201)["spec"]["space"]["num_nodes"] == 16


def test_a_form_shows_no_knob_that_was_left_out(http: TestClient, api: Api) -> None:
    api.post("/campaigns", DOCUMENT, 201)
    page = http.get("/submit?campaign=first&view=yaml", headers=HEADERS).text
    assert "zero_stage: 1" in page
    assert "recompute" not in page.partition("<textarea")[2].partition("</textarea>")[0]


def test_a_clone_keeps_a_stated_split_and_resolves_an_automatic_one_again(api: Api) -> None:
    uneven = {"preset": "llama-8b", "num_layers": 30}
    stated = {"global_batch_size": 256, "pp": [2, 4], "pipeline_split": "layers"}
    # Every knob is stated, so that nothing is automatic.
    plain = {"tp": 1, "vpp": 1, "num_nodes": 8, "micro_batch_size": 1, "zero_stage": 0}
    plain |= {"recompute": "full", "sequence_parallel": False, "precision": "bf16"}
    space = {**stated, **plain, "zero_replicas": 1}
    document = {**DOCUMENT, "model": uneven, "space": space}
    spec = api.post("/campaigns", document, 201)["spec"]
    assert "pipeline_split" not in spec["space"]
    clone = api.post("/campaigns/first/clone", {"seed": 3}, status=201)["spec"]
    assert clone["space"] == spec["space"]

    api.post("/campaigns", {**DOCUMENT, "name": "auto"}, 201)
    space = api.post("/campaigns/auto/clone", {"model": uneven}, status=201)["spec"]["space"]
    assert space["pipeline_split"] == ["layers", "embedding_and_head"]
    assert "pipeline_split" in space["auto"]

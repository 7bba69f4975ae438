"""The refusal of a campaign's document names the field by its path, as that of any other body."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.errors import MAX_PARTS
from tests.kit.api import CAMPAIGN, CLUSTER, Api

SPACE = CAMPAIGN["space"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"space": {**SPACE, "tp": {"from": 1, "to": "x", "step": 1}}}, "body.space.tp.to"),
        ({"start_from": ["nobody"]}, "body.start_from"),
        ({"space": {**SPACE, "tp": [3, 6]}}, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_field_of_a_campaign_is_named_by_its_path(
    api: Api, changes: dict[str, Any], field: str | None
) -> None:
    problem = api.post("/campaigns", {**CAMPAIGN, **changes}, status=422)
    if field is None:
        assert "errors" not in problem, "it is about the document as a whole"
        return
    (error,) = problem["errors"]
    assert error["field"] == field
    assert problem["detail"].endswith(error["message"])


def test_a_wrong_field_of_a_clone_or_change_is_named_by_its_path(api: Api) -> None:
    api.submit()
    wrong = {"budget": {"trials": 0}}
    clone = api.post("/campaigns/first/clone", wrong, status=422)
    changed = api.http.patch("/v1/campaigns/first", json=wrong)
    assert changed.status_code == 422
    for problem in (clone, changed.json()):
        assert [error["field"] for error in problem["errors"]] == ["body.budget.trials"]


def test_an_error_outside_the_body_names_no_field(api: Api) -> None:
    refused = api.http.put("/v1/models/123", json="tiny")
    assert refused.status_code == 422
    assert "errors" not in refused.json()


def test_all_errors_of_a_document_are_listed_with_their_fields(api: Api) -> None:
    document = {
        "name": "a b",
        "model": {"preset": "tiny", "num_layers": 0, "num_heads": -1, "colour": 1},
        "cluster": {**CLUSTER, "num_nodes": 0, "device_memory_gb": "much", "colour": 1},
        "space": {**SPACE, "tp": [0], "pp": {"from": "x", "to": 0}, "tpp": 1},
        "budget": {"trials": 0, "node_hours": "few", "trails": 1},
        "probe": {"warmup": 0, "deadline": "soon", "iterations": True},
        "stop": {"early": 1, "remeasure": -1},
        "constraints": {"memory_headroom": 2},
        "objective": "speed",
        "strategy": "luck",
        "seed": -1,
        "knowledge": "all",
        "start_from": 3,
        "colour": 1,
        "buget": {},
    }
    problem = api.post("/campaigns", document, status=422)
    first = [error["field"] for error in problem["errors"]]
    assert len(first) == MAX_PARTS
    assert "more" in problem["detail"]
    found = set(first)
    while "errors" in problem:  # mended field by field, as a user would, until nothing is wrong
        for error in problem["errors"]:
            mend(document, error["field"].removeprefix("body.").split("."))
        answer = api.http.post("/v1/campaigns", json=document)
        problem = answer.json()
        found |= {error["field"] for error in problem.get("errors", ())}
    assert answer.status_code == 201, problem
    parts = {
        "model": ("num_layers", "num_heads", "colour"),
        "cluster": ("num_nodes", "device_memory_gb", "colour"),
        "space": ("tp", "pp.from", "pp.to", "tpp"),
        "budget": ("trials", "node_hours", "trails"),
        "probe": ("warmup", "deadline", "iterations"),
        "stop": ("early", "remeasure"),
        "constraints": ("memory_headroom",),
    }
    whole = {"name", "objective", "strategy", "seed", "knowledge", "start_from", "colour", "buget"}
    named = {f"{part}.{field}" for part, fields in parts.items() for field in fields}
    assert found == {f"body.{field}" for field in named | whole}


def mend(document: dict[str, Any], path: list[str]) -> None:
    """Takes a wrong field out, or puts the one in its place that tests take."""
    *parents, last = path
    for parent in parents:
        document = document[parent]
    right: dict[str, Any] = {"name": "mended", "tp": 1, "trials": 1}
    if last in right:
        document[last] = right[last]
    elif last == "from":
        document["from"] = 1
    elif last == "to":
        document["to"] = 1
    elif last == "num_nodes":
        document["num_nodes"] = CLUSTER["num_nodes"]
    else:
        document.pop(last, None)


def test_an_unknown_model_is_listed_beside_other_errors(
    api: Api,
) -> None:
    api.http.put("/v1/models/ours", json={"preset": "tiny"})
    changes = {"model": "our", "space": {**SPACE, "tp": 0}}
    problem = api.post("/campaigns", {**CAMPAIGN, **changes}, status=422)
    assert [error["field"] for error in problem["errors"]] == ["body.model", "body.space.tp"]
    assert "did you mean 'ours'?" in problem["errors"][0]["message"]


@pytest.mark.parametrize("kind", ["models", "clusters"])
def test_a_wrong_field_of_a_model_or_cluster_is_named_by_its_path(api: Api, kind: str) -> None:
    wrong = {
        "models": {"num_layers": 0, "num_heads": 0},
        "clusters": {"num_nodes": 0, "devices_per_node": 0},
    }
    preset = {"models": "tiny", "clusters": "frontier"}[kind]
    refused = api.http.put(f"/v1/{kind}/ours", json={"preset": preset, **wrong[kind]})
    assert refused.status_code == 422
    fields = [error["field"] for error in refused.json()["errors"]]
    assert fields == [f"body.{name}" for name in wrong[kind]]

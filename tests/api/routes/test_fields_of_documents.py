"""The refusal of a campaign's document names the field by its path, as that of any other body."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.errors import MAX_PARTS
from tests.kit.api import CAMPAIGN, CLUSTER, Api

SPACE = CAMPAIGN["space"]


SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"preset": "tiny", "num_layers": 0, "num_heads": -1, "colour": 1},
    "cluster": {**CLUSTER, "num_nodes": 0, "device_memory_gb": "much", "colour": 1},
    "space": {**SPACE, "tp": [0], "pp": {"from": "x", "to": 0}, "tpp": 1},
    "budget": {"trials": 0, "node_hours": "few", "trails": 1},
    "probe": {"warmup": 0, "deadline": "soon", "iterations": True},
    "stop": {"early": 1, "remeasure": -1},
    "constraints": {"memory_headroom": 2},
}
WRONG_IN_SECTIONS = {
    *("model.num_layers", "model.num_heads", "model.colour", "stop.early", "stop.remeasure"),
    *("cluster.num_nodes", "cluster.device_memory_gb", "cluster.colour"),
    *("space.tp", "space.pp.from", "space.pp.to", "space.tpp", "constraints.memory_headroom"),
    *("budget.trials", "budget.node_hours", "budget.trails"),
    *("probe.warmup", "probe.deadline", "probe.iterations"),
}
TEXTS = {"name": "a b", "objective": "speed", "strategy": "luck", "knowledge": "all"}
WHOLE: dict[str, Any] = {**TEXTS, "seed": -1, "start_from": 3, "colour": 1, "buget": {}}


def test_all_errors_of_a_document_are_listed_with_their_fields_up_to_a_number(api: Api) -> None:
    for wrong, fields in ((SECTIONS, WRONG_IN_SECTIONS), (WHOLE, set(WHOLE))):
        problem = api.post("/campaigns", {**CAMPAIGN, **wrong}, status=422)
        assert {error["field"] for error in problem["errors"]} == {f"body.{f}" for f in fields}
    problem = api.post("/campaigns", {**SECTIONS, **WHOLE}, status=422)
    assert len(problem["errors"]) == MAX_PARTS
    assert "more" in problem["detail"]


def test_an_unknown_model_is_listed_beside_other_errors(api: Api) -> None:
    api.http.put("/v1/models/ours", json={"preset": "tiny"})
    changes = {"model": "our", "space": {**SPACE, "tp": 0}}
    problem = api.post("/campaigns", {**CAMPAIGN, **changes}, status=422)
    assert [error["field"] for error in problem["errors"]] == ["body.model", "body.space.tp"]
    assert "did you mean 'ours'?" in problem["errors"][0]["message"]


@pytest.mark.parametrize(
    ("path", "preset", "wrong"),
    [
        ("models", "tiny", {"num_layers": 0, "num_heads": 0}),
        ("clusters", "frontier", {"num_nodes": 0, "devices_per_node": 0}),
    ],
)
def test_all_wrong_fields_of_a_model_or_cluster_are_named_by_their_paths(
    api: Api, path: str, preset: str, wrong: dict[str, int]
) -> None:
    refused = api.http.put(f"/v1/{path}/ours", json={"preset": preset, **wrong})
    assert refused.status_code == 422
    fields = [error["field"] for error in refused.json()["errors"]]
    assert fields == [f"body.{name}" for name in wrong]

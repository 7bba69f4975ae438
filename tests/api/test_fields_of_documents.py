"""A refusal of a campaign's document names the field by its path, as that of any other body does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.service import CAMPAIGN, CLUSTER, Api

SPACE = CAMPAIGN["space"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"space": {**SPACE, "tp": [0]}}, "body.space.tp"),
        ({"space": {**SPACE, "tp": {"from": 1, "to": "x", "step": 1}}}, "body.space.tp.to"),
        ({"space": {**SPACE, "colour": 1}}, "body.space"),
        ({"cluster": {**CLUSTER, "num_nodes": 0}}, "body.cluster"),
        ({"model": "gpt-0"}, "body.model"),
        ({"budget": {"trials": 0}}, "body.budget.trials"),
        ({"probe": {"deadline": "soon"}}, "body.probe.deadline"),
        ({"name": "a b"}, "body.name"),
        ({"start_from": ["nobody"]}, "body.start_from"),
        ({"colour": 1}, None),
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
    assert f"{field.removeprefix('body.')}: {error['message']}" == problem["detail"]


def test_so_is_one_of_a_clone_and_of_a_change(api: Api) -> None:
    api.submit()
    wrong = {"budget": {"trials": 0}}
    clone = api.post("/campaigns/first/clone", wrong, status=422)
    changed = api.http.patch("/v1/campaigns/first", json=wrong)
    assert changed.status_code == 422
    for problem in (clone, changed.json()):
        assert [error["field"] for error in problem["errors"]] == ["body.budget.trials"]


def test_what_is_wrong_with_something_else_than_the_body_names_no_field_of_it(api: Api) -> None:
    refused = api.http.put("/v1/models/123", json="tiny")
    assert refused.status_code == 422
    assert "errors" not in refused.json()

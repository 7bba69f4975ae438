"""Groups of experts of which a token takes some must hold the experts that it takes."""

from __future__ import annotations

from typing import Any

import pytest

from layout_tuner.errors import ModelShapeInvalidError
from layout_tuner.search_spaces.models.model_shape import ModelShape

MODEL: dict[str, Any] = {
    "family": "llama",
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "seq_length": 32,
    "vocab_size": 64,
    "num_experts": 8,
    "experts_per_token": 4,
    "moe_ffn_hidden_size": 64,
}


@pytest.mark.parametrize(("groups", "taken"), [(4, 1), (3, 2), (4, 5), (0, 1), (4, 0), (8, 3)])
def test_groups_without_the_experts_of_a_token_are_refused(groups: int, taken: int) -> None:
    fields = {"router_groups": groups, "router_topk_groups": taken}
    with pytest.raises(ModelShapeInvalidError) as refused:
        ModelShape.from_mapping(MODEL | fields)
    assert (
        f"router_groups={groups} must divide num_experts=8, and router_topk_groups={taken} be from "
        "1 to router_groups and have experts_per_token=4 of them"
    ) in str(refused.value)


@pytest.mark.parametrize(("groups", "taken"), [(4, 2), (8, 4), (2, 1), (0, 0)])
def test_groups_with_enough_experts_are_taken(groups: int, taken: int) -> None:
    fields = {"router_groups": groups, "router_topk_groups": taken}
    assert ModelShape.from_mapping(MODEL | fields).router_topk_groups == taken

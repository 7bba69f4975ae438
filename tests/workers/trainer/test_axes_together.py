"""Context parallelism, sharded weights, uneven stages and experts, each beside each other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.trainer.cases import ADAMW, assert_same_training, make_layout, make_shape, train
from tests.workers.trainer.test_parity import FAMILIES, reference

pytestmark = pytest.mark.ranks

CP = {"cp": 2}
UNEVEN = {"pp": 2, "pipeline_split": "embedding"}
WITHOUT_WINDOWS: dict[str, Any] = {"attention_window": None, "full_attention_every": None}
"""Over cp, windows are for a2a alone (the rule `trainer_window_over_cp`)."""


@pytest.mark.sampled(4)
@FAMILIES
@pytest.mark.parametrize(
    "axes",
    [
        CP | {"zero_stage": 2},
        CP | {"zero_stage": 3},
        CP | {"zero_stage": 3, "cp_comm_type": "a2a"},
        CP | {"dp": 2, "zero_stage": 2, "cp_comm_type": "p2p"},
        CP | {"dp": 2, "zero_stage": 3},
        CP | {"dp": 2, "zero_stage": 3, "zero_replicas": 2},
        CP | {"tp": 2, "zero_stage": 3, "sequence_parallel": True},
        CP | {"pp": 2, "zero_stage": 3, "recompute": "full"},
        CP | UNEVEN,
        UNEVEN | {"dp": 2, "zero_stage": 2},
        UNEVEN | {"dp": 2, "zero_stage": 3},
        UNEVEN | {"tp": 2, "sequence_parallel": True},
    ],
    ids=str,
)
def test_they_follow_the_reference_together(family: str, axes: dict[str, Any]) -> None:
    heads = {"num_heads": 8, "num_kv_heads": 8 if family == "gpt" else 4}
    layers = 3 if "pipeline_split" in axes else 2
    layout = make_layout(**axes)
    windows = {} if layout.cp == 1 or layout.cp_comm_type == "a2a" else WITHOUT_WINDOWS
    shape = make_shape(family, num_layers=layers, **heads, **windows)
    assert_same_training(train(shape, layout), reference(shape, ADAMW))


@pytest.mark.parametrize("comm_type", ["all_gather", "p2p", "a2a"])
def test_experts_get_the_same_tokens_in_turn_under_cp(comm_type: str) -> None:
    """Balanced routing goes by the position in the sequence, which ranks of cp share."""
    heads = {"num_heads": 8, "num_kv_heads": 4}
    shape = make_shape("moe", num_layers=2, **heads, **WITHOUT_WINDOWS)
    whole = train(shape, make_layout(), balanced_routing=True)
    shared = train(shape, make_layout(cp=2, cp_comm_type=comm_type), balanced_routing=True)
    assert_same_training(shared, whole)

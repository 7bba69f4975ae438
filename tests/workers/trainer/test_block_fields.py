"""Every field of a block is trained as the reference does, alone, under every axis.

Pairs of fields and axes are for `test_parity.py`, with its families `neox` and `glm`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from layout_tuner.workers.trainer.model.model import RankModel
from layout_tuner.workers.trainer.options_in_effect import options_in_effect
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.cases import (
    ADAMW,
    COLUMNS,
    CUT,
    DP,
    PP,
    STEPS,
    TP,
    VPP,
    ZERO,
    ZERO_2,
    ZERO_3,
    assert_bitwise_equal,
    assert_same_training,
    initial_weights,
    lone_mesh,
    make_layout,
    make_shape,
    movement,
    on_layout,
    train,
)
from tests.workers.trainer.test_parity import SGD, reference
from tests.workers.trainer.tolerances import FP32, parameter_error, unit_roundoff

pytestmark = pytest.mark.ranks

ALL_HEADS = {"num_heads": 8, "num_kv_heads": 4}
WIDE = {"num_experts": 8, "attention_window": None, "full_attention_every": None}
SIGMOID = WIDE | {"router_score": "sigmoid"}

DENSE: dict[str, dict[str, Any]] = {
    "geglu": {"activation": "geglu"},
    "gelu": {"activation": "gelu"},
    "relu2": {"activation": "relu2"},
    "layer-norm": {"norm": "layer"},
    "qkv-biases": {"biases": "qkv"},
    "attention-biases": {"biases": "attention"},
    "all-biases": {"biases": "all"},
    "all-biases-ungated": {"biases": "all", "activation": "relu2"},
    "parallel": {"parallel_block": True},
    "parallel-layer-norm": {"parallel_block": True, "norm": "layer", "tied_embeddings": True},
    "half-rotary": {"rotary_fraction": 0.5, "head_dim": 16},
    "no-rotary": {"rotary_fraction": 0.0},
    "width-norm": {"qk_norm": "width"},
    "output-gate": {"attention_output_gate": True},
    "output-gate-and-biases": {"attention_output_gate": True, "biases": "qkv", "qk_norm": True},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "experts-relu2": WIDE | {"activation": "relu2"},
    "experts-gelu": WIDE | {"activation": "gelu"},
    "experts-geglu": WIDE | {"activation": "geglu"},
    "experts-biases": WIDE | {"biases": "all"},
    "experts-relu2-biases": WIDE | {"biases": "all", "activation": "relu2"},
    "sigmoid": SIGMOID,
    "sigmoid-of-one": SIGMOID | {"experts_per_token": 1},
    "sigmoid-groups": SIGMOID | {"router_groups": 4, "router_topk_groups": 2},
    "softmax-groups": WIDE | {"router_groups": 2, "router_topk_groups": 1},
    "scaled": WIDE | {"router_scaling_factor": 2.5},
    "sigmoid-scaled": SIGMOID | {"router_scaling_factor": 2.5},
    "shared-gate": WIDE | {"shared_expert_gate": True},
    "parallel-experts": WIDE | {"parallel_block": True},
}
SHAPES = {name: make_shape("llama", **ALL_HEADS, **fields) for name, fields in DENSE.items()} | {
    name: make_shape("moe", **ALL_HEADS, **fields) for name, fields in EXPERTS.items()
}

SUMS: dict[str, dict[str, Any]] = {
    "tp4": {"tp": 4, "sequence_parallel": False},
    "tp4 cut": {"tp": 4, "sequence_parallel": True},
    "columns4": {"tp_columns": 4},
    "tp2 columns2": TP | COLUMNS,
    "cp4 ring": {"cp": 4, "cp_comm_type": "p2p"},
    "cp4 a2a": {"cp": 4, "cp_comm_type": "a2a"},
    "dp4": {"dp": 4},
    "dp4 zero2": {"dp": 4, "zero_stage": 2},
    "ep4": {"dp": 4, "ep": 4},
    "ep2 etp2": {"dp": 4, "ep": 2, "etp": 2, "zero_stage": 1},
    "tp2 etp2 zero3": CUT | {"dp": 2, "etp": 2, "zero_stage": 3},
    "tp2 cut pp2 zero_bubble": CUT | PP | {"schedule": "zero_bubble"},
}
"""Layouts of four ranks that add sums in another order than a lone rank."""

Change = tuple[dict[str, Any], dict[str, Any]]
SAME: dict[str, Change] = {
    "pp4": ({"pp": 4}, {}),
    "vpp2": (VPP, {}),
    "zero_bubble": (PP | {"schedule": "zero_bubble"}, PP),
    "zero1": (ZERO | CUT, DP | CUT),
    "zero3": (ZERO_3 | CUT, ZERO_2 | CUT),
    "full": ({"recompute": "full"} | PP, {}),
    "layernorm": ({"recompute": "layernorm"} | CUT, CUT),
    "mlp": ({"recompute": "mlp+layernorm"}, {}),
    "core_attention": ({"recompute": "selective"} | TP, TP),
}
"""Layouts with the same sums in the same order: what is changed, and what it is compared with."""


def legal(name: str, axes: str) -> bool:
    is_mixture = name in EXPERTS
    if is_mixture and ("columns" in axes or axes == "tp4"):
        return False
    return is_mixture or not ("ep" in axes or "etp" in axes)


@pytest.mark.sampled(23)
@pytest.mark.parametrize(
    ("name", "axes"), [(name, axes) for name in SHAPES for axes in SUMS if legal(name, axes)]
)
def test_a_field_trains_under_an_axis(name: str, axes: str) -> None:
    """Each weight moves as the reference's, but for the roundings of both at each step."""
    shape, layout = SHAPES[name], make_layout(**{"micro_batch_size": 2} | SUMS[axes])
    found, expected = train(shape, layout, SGD), reference(shape, SGD)
    assert_same_training(found, expected)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    moved, should = movement(found), movement(expected)
    for weight, way in should.items():
        rounded = 2 * STEPS * unit_roundoff(FP32) * float(expected.weights[weight].norm())
        allowed = parameter_error(shape) * float(way.norm()) + rounded
        assert float((moved[weight] - way).norm()) < allowed, weight


@pytest.mark.sampled(23)
@pytest.mark.parametrize(("name", "change"), [(name, each) for name in SHAPES for each in SAME])
def test_it_changes_no_bit_of_a_field(name: str, change: str) -> None:
    fields, beside = SAME[change]
    if "tp" in beside and name in EXPERTS:
        fields, beside = fields | CUT, beside | CUT
    # A tied matrix is summed as embedding and as head: by turns on one stage, apart on two.
    shape = dataclasses.replace(SHAPES[name], num_layers=4, tied_embeddings=False)
    found = train(shape, make_layout(**fields), ADAMW, 3)
    assert_bitwise_equal(found, train(shape, make_layout(**beside), ADAMW, 3))


@pytest.mark.parametrize("name", SHAPES)
def test_a_lone_rank_trains_a_field(name: str) -> None:
    shape = SHAPES[name]
    assert_same_training(train(shape, make_layout()), reference(shape, ADAMW))


@pytest.mark.parametrize("name", SHAPES)
def test_the_trainer_has_the_parameters_of_a_shape(name: str) -> None:
    shape = SHAPES[name]
    held = sum(each.numel() for each in RankModel(shape, lone_mesh()).parameters())
    assert held == shape.num_parameters
    assert sum(each.numel() for each in initial_weights(shape).values()) == shape.num_parameters


@pytest.mark.parametrize(
    ("fields", "axes", "has_effect"),
    [
        ({"norm": "layer", "activation": "relu2"}, {}, False),
        ({"norm": "layer"}, {}, True),
        ({"activation": "relu2"}, {}, True),
        ({"activation": "relu2"}, COLUMNS, False),
        ({"norm": "layer", "activation": "gelu", "qk_norm": True}, TP, True),
        ({"norm": "layer", "activation": "gelu", "qk_norm": "width"}, {}, True),
        ({"norm": "layer", "activation": "gelu", "qk_norm": "width"}, TP, False),
    ],
)
def test_compile_is_refused_where_it_changes_nothing(
    fields: dict[str, Any], axes: dict[str, Any], has_effect: bool
) -> None:
    def work(training: Training) -> bool:
        return "compile" in options_in_effect(training)

    found = on_layout(make_layout(**axes), work, make_shape("llama", **fields))
    assert set(found) == {has_effect}

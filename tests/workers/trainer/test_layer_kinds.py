"""Latent attention and layers of several kinds train as the reference does, under every axis.

Each shape has its turn with each axis; pairs are for `test_parity.py`, with its families `mla` and
`hybrid`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from layout_tuner.workers.trainer.model.model import RankModel
from tests.workers.trainer.cases import (
    ADAMW,
    CUT,
    DP,
    LATENT,
    PP,
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
    relative_l2,
    train,
)
from tests.workers.trainer.test_block_fields import SUMS
from tests.workers.trainer.test_parity import SGD, reference
from tests.workers.trainer.tolerances import parameter_error

pytestmark = pytest.mark.ranks

HEADS = {"num_heads": 8, "num_kv_heads": 4}
MIXTURE = {
    "num_experts": 8,
    "experts_per_token": 2,
    "moe_ffn_hidden_size": 32,
    "shared_expert_ffn_hidden_size": 32,
}
KINDS = {"attention_window": 6, "window_num_heads": 4, "window_num_kv_heads": 4}

SHAPES = {
    "latent": make_shape(**LATENT),
    "latent-of-keys": make_shape(**LATENT | {"q_lora_rank": 0}),
    "latent-wide-values": make_shape(**LATENT | {"v_head_dim": 24}),
    "latent-window": make_shape(
        **LATENT, attention_window=6, layer_kinds=("window+dense", "full+dense")
    ),
    "latent-experts": make_shape(**LATENT, **MIXTURE, num_dense_layers=1),
    "windows": make_shape(**HEADS, **KINDS, layer_kinds=("window+dense", "full+dense")),
    "alone": make_shape(**HEADS, num_layers=4, layer_kinds=("full", "dense")),
    "every-second": make_shape(**HEADS, **MIXTURE, experts_every=2),
    "hybrid": make_shape("hybrid", num_layers=4),
}
MIXTURES = {name for name, shape in SHAPES.items() if shape.num_experts}
WINDOWS = {name for name, shape in SHAPES.items() if shape.attention_window}
LATENTS = {name for name, shape in SHAPES.items() if shape.kv_lora_rank}

UP = {"recompute": "mla_up_proj"}
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pp4": ({"pp": 4}, {}),
    "vpp2": (VPP, {}),
    "stages": (PP | {"pipeline_layout": "Et*3|tL"}, PP),
    "zero1": (ZERO | CUT, DP | CUT),
    "zero3": (ZERO_3 | CUT, ZERO_2 | CUT),
    "zero_bubble": (CUT | PP | {"schedule": "zero_bubble"}, CUT | PP),
    "full": ({"recompute": "full"} | PP, {}),
    "core_attention": ({"recompute": "selective"} | TP | CUT, CUT),
    "layernorm": ({"recompute": "layernorm"} | CUT, CUT),
    "some layers": ({"recompute": "core_attention", "recompute_layers": "1"} | PP, PP),
    "mla_up_proj": (UP, {}),
    "mla_up_proj cut": (UP | CUT, CUT),
    "mla_up_proj a2a": (UP | {"cp": 2, "cp_comm_type": "a2a"}, {"cp": 2, "cp_comm_type": "a2a"}),
    "mla_up_proj ring": (UP | {"cp": 2}, {"cp": 2}),
    "both": ({"recompute": "core_attention+layernorm+mla_up_proj"} | CUT, CUT),
    "both zero_bubble": (
        {"recompute": "core_attention+mla_up_proj", "schedule": "zero_bubble"} | PP | ZERO_2,
        PP | ZERO_2,
    ),
    "mla_up_proj fp16": (UP | {"precision": "fp16"}, {"precision": "fp16"}),
}
"""Layouts with the same sums in the same order: what is changed, and what it is compared with."""


def trains(name: str, axes: str) -> bool:
    """Whether the layout is legal with the shape."""
    if "columns" in axes and (name in LATENTS or name in MIXTURES):
        return False
    if name in WINDOWS and "ring" in axes:
        return False
    if "mla_up_proj" in axes or "both" in axes:
        return name in LATENTS
    return name in MIXTURES if "ep" in axes or "etp" in axes else True


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("name", "axes"), [(name, axes) for name in SHAPES for axes in SUMS if trains(name, axes)]
)
def test_a_shape_trains_under_an_axis(name: str, axes: str) -> None:
    shape, layout = SHAPES[name], make_layout(**SUMS[axes])
    found, expected = train(shape, layout, SGD), reference(shape, SGD)
    assert_same_training(found, expected)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    moved, should = movement(found), movement(expected)
    for weight in moved:
        error = relative_l2({weight: moved[weight]}, {weight: should[weight]})
        assert error < parameter_error(shape), weight


@pytest.mark.sampled(12)
@pytest.mark.parametrize(
    ("name", "change"), [(name, each) for name in SHAPES for each in CHANGES if trains(name, each)]
)
def test_it_changes_no_bit_of_a_shape(name: str, change: str) -> None:
    fields, beside = CHANGES[change]
    shape = dataclasses.replace(SHAPES[name], num_layers=4)
    found = train(shape, make_layout(**beside | fields), ADAMW, 3)
    assert_bitwise_equal(found, train(shape, make_layout(**beside), ADAMW, 3))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_lone_rank_trains_a_shape(name: str, precision: Any) -> None:
    shape, balanced = SHAPES[name], name in MIXTURES and precision != "fp32"
    found = train(shape, make_layout(precision=precision), balanced_routing=balanced)
    assert_same_training(found, reference(shape, ADAMW, balanced=balanced))


@pytest.mark.parametrize("name", SHAPES)
def test_the_trainer_has_the_parameters_of_a_shape(name: str) -> None:
    shape = SHAPES[name]
    held = sum(each.numel() for each in RankModel(shape, lone_mesh()).parameters())
    assert held == shape.num_parameters
    assert sum(each.numel() for each in initial_weights(shape).values()) == shape.num_parameters

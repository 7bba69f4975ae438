"""Which parts of a layout a cheap probe may run, and what it is called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from layout_tuner.search_spaces.campaigns.fidelity import (
    Fidelity,
    cheap_iterations,
    fidelities,
    fidelity_of,
    with_layers,
)
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape

MODEL = model_preset("gpt-175b")
QWEN = model_preset("qwen3-30b-a3b")
FRONTIER = CLUSTER_PRESETS["frontier"]
LARGE = Layout(
    num_nodes=16, tp=8, pp=8, dp=2, num_microbatches=640, recompute="full", precision="bf16"
)

HYBRID: Final = {
    "family": "llama",
    "num_layers": 24,
    "hidden_size": 256,
    "num_heads": 8,
    "seq_length": 128,
    "vocab_size": 1024,
    "rotary_fraction": 0,
    "num_experts": 8,
    "experts_per_token": 2,
    "moe_ffn_hidden_size": 128,
    "layer_kinds": ["mamba2", "experts", "mamba2", "full", "mamba2", "experts"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "mamba_state_dim": 16,
    "mamba_num_groups": 1,
}


def found(layout: Layout) -> list[Fidelity]:
    """Those of the fewest micro-batches."""
    every = fidelities(layout, MODEL, FRONTIER)
    return [each for each in every if each.num_microbatches == every[0].num_microbatches]


def test_micro_batches_go_first_then_replicas_then_layers_and_double_up_to_half() -> None:
    fewer, one_replica, few_layers = found(LARGE)
    assert fewer == Fidelity(num_microbatches=16, dp=2, num_layers=96)  # two pipelines full
    assert one_replica == Fidelity(num_microbatches=16, dp=1, num_layers=96)
    assert few_layers == Fidelity(num_microbatches=16, dp=1, num_layers=16)  # two a stage
    assert fidelities(LARGE, MODEL, FRONTIER) == [
        replace(each, num_microbatches=count)
        for count in (16, 32, 64, 128, 256)
        for each in found(LARGE)
    ]
    for layout, counts in (
        (replace(LARGE, num_microbatches=64), {16, 32}),
        (replace(LARGE, num_microbatches=32), {16}),
        (replace(LARGE, num_microbatches=31), set()),  # cheap already
        # An interleaved schedule gets a multiple of its stages.
        (replace(LARGE, num_nodes=12, pp=6, vpp=2), {12, 24, 48, 96, 192}),
    ):
        parts = fidelities(layout, MODEL, FRONTIER)
        assert {each.num_microbatches for each in parts} == counts, layout.key
    assert [cheap_iterations(count) for count in (1, 4, 10, 100)] == [1, 4, 4, 4]


def test_what_runs_has_the_nodes_of_its_replicas_and_all_other_knobs() -> None:
    _, one_replica, few_layers = found(LARGE)
    assert one_replica.reduced(LARGE) == replace(LARGE, num_nodes=8, dp=1, num_microbatches=16)
    assert one_replica.reduced_model(MODEL) is MODEL
    reduced = few_layers.reduced_model(MODEL)
    assert (reduced.num_layers, reduced.hidden_size) == (16, MODEL.hidden_size)
    assert reduced.name == "gpt-175b-16-layers"


def test_a_part_is_read_back_from_what_runs_and_keeps_memory_with_all_layers() -> None:
    for each in found(LARGE):
        assert fidelity_of(LARGE, each.reduced(LARGE), each.num_layers) == each
        assert each.keeps_memory(MODEL) == (each.num_layers == 96)


def test_a_part_has_a_key_and_words_of_what_it_leaves_out() -> None:
    fewer, _, few_layers = found(LARGE)
    assert fewer.key(LARGE, MODEL) == f"{LARGE.key}~mb16-dp2"
    assert few_layers.key(LARGE, MODEL) == f"{LARGE.key}~mb16-dp1-l16"
    assert fewer.words(LARGE, MODEL) == "16 of 640 micro-batches"
    assert few_layers.words(LARGE, MODEL) == (
        "16 of 640 micro-batches, 1 of 2 replicas, 16 of 96 layers"
    )


def test_layers_of_a_split_that_counts_the_ends_are_two_a_stage_with_them() -> None:
    uneven = replace(LARGE, pipeline_split="embedding_and_head")
    *_, few_layers = fidelities(uneven, replace(MODEL, num_layers=94), FRONTIER)
    assert few_layers.num_layers == 14  # 16 with the ends, two a stage


@pytest.mark.parametrize(
    ("model", "changes", "replicas"),
    [
        # The shards would grow.
        (MODEL, {"zero_stage": 1}, [2, 2]),
        # dp 1 would take half a node.
        (MODEL, {"num_nodes": 2, "tp": 2, "pp": 2, "dp": 4}, [4, 2]),
        (QWEN, {"num_nodes": 8, "tp": 1, "pp": 1, "dp": 64, "ep": 16}, [64, 16]),
        (QWEN, {"num_nodes": 8, "tp": 1, "pp": 1, "dp": 64}, [64, 8]),
    ],
    ids=["zero", "half a node", "experts", "whole experts"],
)
def test_replicas_fill_nodes_keep_shards_and_divide_the_experts_as_before(
    model: ModelShape, changes: dict[str, Any], replicas: list[int]
) -> None:
    parts = fidelities(replace(LARGE, **changes), model, FRONTIER)
    assert [each.dp for each in parts][:2] == replicas


@pytest.mark.parametrize(("dense", "of_sixteen"), [(3, 0), (6, 1), (48, 8), (95, 15)])
def test_dense_layers_and_layers_with_experts_stay_in_proportion(
    dense: int, of_sixteen: int
) -> None:
    model = replace(
        model_preset("mixtral-8x7b"), num_layers=96, num_dense_layers=dense, ffn_hidden_size=8192
    )
    *_, few_layers = fidelities(replace(LARGE, sequence_parallel=True), model, FRONTIER)
    reduced = few_layers.reduced_model(model)
    assert (reduced.num_layers, reduced.num_dense_layers) == (16, of_sixteen)
    width = 8192 if of_sixteen else model.moe_ffn_hidden_size
    assert reduced.ffn_hidden_size == width
    assert reduced.moe_ffn_hidden_size == model.moe_ffn_hidden_size


def test_every_kind_of_layer_stays_in_its_place() -> None:
    hybrid = ModelShape.from_mapping(HYBRID)
    fewer = with_layers(hybrid, 8)
    assert fewer.kind_of_layers == (
        *("mamba2", "experts", "mamba2", "experts", "mamba2", "full", "experts", "mamba2"),
    )
    assert with_layers(hybrid, 3).kind_of_layers == ("mamba2", "experts", "full")
    assert {*with_layers(hybrid, 16).kind_of_layers} == {*hybrid.kind_of_layers}


def test_too_few_layers_for_each_kind_are_no_part() -> None:
    hybrid = ModelShape.from_mapping(HYBRID)
    layout = Layout(dp=1, num_microbatches=64, precision="bf16")
    assert {each.num_layers for each in fidelities(layout, hybrid, FRONTIER)} == {24}
    none = dict.fromkeys((name for name in HYBRID if name.startswith("mamba_")), 0)
    two = replace(hybrid, **none, layer_kinds=("full+experts", "full"))
    assert {each.num_layers for each in fidelities(layout, two, FRONTIER)} == {24, 2}

"""Memory and time of models with experts, beside those of dense models."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from layout_tuner.predictions.estimates.distinct_blocks import DistinctBlocks
from layout_tuner.predictions.estimates.links import GroupLinks, Links, level_links
from layout_tuner.predictions.estimates.peak_memory import stage_memory
from layout_tuner.predictions.estimates.step_shape import StepShape
from layout_tuner.predictions.estimates.step_time import TERM_NAMES, time_terms
from layout_tuner.predictions.estimates.trainer_kernels import ANY_TRAINER
from layout_tuner.predictions.estimates.trainer_storage import (
    EMBEDDED_TRAINER,
    MEGATRON_2022,
    MEGATRON_LIKE,
    TrainerStorage,
)
from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster
from layout_tuner.search_spaces.layouts.layout import ZERO_STAGES, Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.layouts.rank_mesh import coordinates, expert_coordinates
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape

MIXTRAL = model_preset("mixtral-8x7b")
H100 = resolve_cluster("h100-sxm")[0]
LAYOUT = Layout(
    num_nodes=4, tp=2, etp=2, pp=4, num_microbatches=8, sequence_parallel=True, precision="bf16"
)
MIXED = replace(
    MIXTRAL,
    num_layers=8,
    num_dense_layers=3,
    ffn_hidden_size=12288,
    shared_expert_ffn_hidden_size=2048,
    qk_norm=True,
)
"""Dense layers first, then experts beside a shared one."""
FOLDED = [
    replace(LAYOUT, dp=4, ep=4),
    replace(LAYOUT, dp=4, ep=8, etp=1),
    replace(LAYOUT, dp=4, ep=2, etp=1),
    replace(LAYOUT, dp=4, etp=4),
    replace(LAYOUT, dp=2, cp=2, ep=2, pp=2),
    replace(LAYOUT, dp=8, tp=1, ep=2, etp=4, pp=2),
]


def terms(model: ModelShape, layout: Layout = LAYOUT) -> dict[str, float]:
    found = time_terms(layout, model, H100)
    return dict(zip(found.names, found.seconds[0].tolist(), strict=True))


def layer_parameters(layout: Layout, layer: int) -> tuple[int, int]:
    """Parameters of a layer of `MIXED` on a rank, summed by matrix: others, and experts."""
    h, kv, tp = 4096, 1024, layout.tp
    others = 2 * h + 2 * 128 + (2 * h * h + 2 * h * kv) // tp
    if not MIXED.has_experts(layer):
        return others + 3 * h * 12288 // tp, 0
    expert = 3 * h * (14336 // layout.etp)
    return others + 8 * h + 3 * h * 2048 // tp, 8 // layout.ep * expert


def sharing(layout: Layout) -> tuple[int, int]:
    """Ranks that share a copy of what rank 0 holds: of what is not experts, and of experts."""
    ranks = range(layout.tp * layout.cp * layout.dp)
    others = [coordinates(rank, layout).tp_rank for rank in ranks].count(0)
    places = [expert_coordinates(rank, layout) for rank in ranks]
    experts = [(place.etp_rank, place.ep_rank) for place in places].count((0, 0))
    return others // layout.zero_replicas, experts // layout.zero_replicas


@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
def test_experts_are_shared_by_the_ranks_that_hold_the_same_ones(zero_stage: int) -> None:
    with_copies = [replace(each, zero_replicas=2) for each in FOLDED if each.edp > 1]
    for layout in (replace(each, zero_stage=zero_stage) for each in (*FOLDED, *with_copies)):
        shards = sharing(layout) if zero_stage else (1, 1)
        for stage, found in enumerate(stage_memory(layout, MIXED)):
            layers = layout.layers_of_stage(stage, MIXED.num_layers)
            of_layers = [layer_parameters(layout, i) for i in layers]
            others, experts = map(sum, zip(*of_layers, strict=True))
            norm = 4096 if stage == layout.pp - 1 else 0
            end = MIXED.vocab_size * 4096 // layout.tp + norm if stage in (0, layout.pp - 1) else 0
            whole = others + end + experts
            share = (others + end) / shards[0] + experts / shards[1]
            # The largest two in succession, ends included; what nobody shares is no copy.
            copied = [sum(n for n, d in zip(i, shards, strict=True) if d > 1) for i in of_layers]
            ends = [end if shards[0] > 1 else 0] * (stage in (0, layout.pp - 1))
            copied = [*copied, *ends] if stage else [*ends, *copied]
            gathered = share + max(a + b for a, b in pairwise(copied))
            gradients, weights = (gathered if zero_stage > at else whole for at in (1, 2))
            assert found.optimizer_bytes == pytest.approx(12 * share), layout.key
            assert found.gradients_bytes == pytest.approx(4 * gradients), layout.key
            assert found.weights_bytes == pytest.approx(2 * weights), layout.key


@pytest.mark.parametrize("layout", FOLDED, ids=lambda layout: layout.key)
def test_a_rank_holds_the_rows_of_the_tokens_that_come_to_its_experts(layout: Layout) -> None:
    """Per row 2 f / etp in 16 bits and 32 bytes; the input and 8 where it came from elsewhere.

    Other trainers keep the sorted input always, and beside 2 f the activation's product with the
    gate's other half, or the activation too.
    Inputs are gathered for attention and a shared expert over tp, and for others over etp: the
    embedded trainer keeps them beyond one that gathers again.
    """
    more = replace(MIXTRAL, experts_per_token=3)
    own = 4096 // (layout.cp * layout.tp)  # tokens of a rank between layers
    rows = layout.etp * own  # one a token; a sequence a micro-batch
    layers = len(layout.layers_of_stage(0, 32)) * layout.pp  # micro-batches in flight there
    width = 14336 / layout.etp
    came = 4096 if layout.ep > 1 else 0

    def kept(model: ModelShape, storage: TrainerStorage) -> float:
        return stage_memory(layout, model, storage)[0].activations_bytes

    for storage, elements in (
        (EMBEDDED_TRAINER, 2 * width + came),
        (MEGATRON_2022, 4 * width + 4096),
        (MEGATRON_LIKE, 3 * width + 4096),
    ):
        index = 40 if layout.ep > 1 else 32
        added = kept(more, storage) - kept(MIXTRAL, storage)
        assert added == pytest.approx(layers * rows * (2 * elements + index))
    for shared in (0, 2048):
        model = replace(MIXTRAL, shared_expert_ffn_hidden_size=shared)
        whole, again = (
            kept(model, replace(EMBEDDED_TRAINER, gathered_share=share)) for share in (1.0, 0.0)
        )
        tokens = (1 + bool(shared)) * (layout.tp - 1) * own + (layout.etp - 1) * own
        assert whole - again == layers * 4096 * 2 * tokens


def test_the_work_is_that_of_the_experts_that_a_token_takes() -> None:
    dense = terms(MIXTRAL.dense)
    # A mixture of one expert, which every token takes: a dense model and a small router.
    alone = replace(MIXTRAL, num_experts=1, experts_per_token=1)
    one, two = terms(alone), terms(replace(alone, num_experts=2))
    assert one["matrices"] == dense["matrices"]
    assert one["attention"] == dense["attention"] == two["attention"]
    assert two["matrices"] == pytest.approx(one["matrices"], rel=0.05)  # rows are halved
    assert two["matrix_bytes"] > one["matrix_bytes"]
    both = terms(replace(MIXTRAL, num_experts=2))
    active = MIXTRAL.num_attention_matrix_parameters + 2 * 3 * 4096 * 14336
    ratio = active / MIXTRAL.dense.num_layer_matrix_parameters
    assert both["matrices"] / one["matrices"] == pytest.approx(ratio, rel=0.05)


def test_attention_follows_window_and_head_and_layers_of_both_kinds_take_the_mean() -> None:
    windowed = replace(MIXTRAL, attention_window=1024)
    share = (4096**2 - 3072**2) / 4096**2
    assert terms(windowed)["attention"] == pytest.approx(share * terms(MIXTRAL)["attention"])
    wide = replace(MIXTRAL, head_dim=256)
    assert terms(wide)["attention"] == 2 * terms(MIXTRAL)["attention"]
    mixed = replace(MIXTRAL, num_dense_layers=8)
    found, expert, dense = (terms(m)["matrices"] for m in (mixed, MIXTRAL, mixed.dense))
    assert found == pytest.approx(0.75 * expert + 0.25 * dense)


@pytest.mark.parametrize("layout", FOLDED, ids=lambda layout: layout.key)
def test_links_of_experts_are_those_between_the_ranks_of_the_mesh(layout: Layout) -> None:
    columns = LayoutColumns.of(layout)
    links = Links(columns, H100, level_links(H100, columns))
    ranks = range(layout.tp * layout.cp * layout.dp)
    places = [expert_coordinates(rank, layout) for rank in ranks]
    axes: list[tuple[GroupLinks, Callable[[int], Any]]] = [
        (links.expert_tensor, lambda rank: (places[rank].ep_rank, places[rank].edp_rank)),
        (links.expert, lambda rank: (places[rank].etp_rank, places[rank].edp_rank)),
        (links.expert_data, lambda rank: (places[rank].etp_rank, places[rank].ep_rank)),
        (links.data, lambda rank: coordinates(rank, layout).tp_rank),
    ]
    for found, of in axes:
        # How many ranks of a group are on each of its nodes of 8 devices.
        nodes: dict[Any, Counter[int]] = defaultdict(Counter)
        for rank in ranks:
            nodes[of(rank)][rank // 8] += 1
        counts = [list(each.values()) for each in nodes.values()]
        assert {sum(count) for count in counts} == {int(found.ranks)}
        assert {here for count in counts for here in count} == {int(found.here)}
        assert {len(count) == 1 for count in counts} == {bool(found.inside)}
        assert float(found.doublings) == np.log2(len(counts[0]))


@pytest.mark.parametrize(
    ("knobs", "near", "far"),
    [
        ({"dp": 8, "ep": 8}, 7 / 8, 0),
        ({"dp": 16, "ep": 4}, 3 / 4, 0),
        ({"dp": 16, "ep": 8, "etp": 2}, 3 / 8, 4 / 8),
        ({"dp": 8, "cp": 2, "ep": 16}, 7 / 16, 8 / 16),
        ({"dp": 8, "tp": 2, "ep": 16, "sequence_parallel": True}, 7 / 16, 8 / 16),
        ({"dp": 16}, 0, 0),
    ],
    ids=str,
)
def test_rows_are_exchanged_four_times_and_six_with_full_recomputation(
    knobs: dict[str, Any], near: float, far: float
) -> None:
    model = replace(MIXTRAL, num_experts=16)
    layout = Layout(num_microbatches=3, precision="bf16", **knobs)
    rows = layout.etp * 4096 * 2 / (layout.cp * layout.tp)
    latency_s = 0 if layout.ep == 1 else 4e-5 + (14e-6 if far else 3.4e-6)
    full = replace(layout, recompute="full")
    for each, times, counted in ((layout, 4, 1), (full, 6, 2)):
        sent = 32 * 3 * times * rows * 4096 * 2
        found = terms(model, each)
        assert found["exchange_inside"] == pytest.approx(near * sent / 360e9)
        assert found["exchange_across"] == pytest.approx(far * sent / 50e9)
        assert found["exchange_latency"] == pytest.approx(32 * 3 * (times + counted) * latency_s)


def test_experts_of_whole_width_are_not_reduced_over_tp() -> None:
    """Attention has one all-reduce a pass, a shared expert another; etp gathers L of its ranks."""
    layout = replace(LAYOUT, pp=1, etp=1, num_microbatches=1)
    one = 2 * 1 / 2 * 2 * 4096 * 4096 / 360e9  # of all tokens over tp
    ends = 2
    assert terms(MIXTRAL, layout)["tensor_inside"] == pytest.approx((32 * 2 + ends) * one)
    shared = replace(MIXTRAL, shared_expert_ffn_hidden_size=1024)
    assert terms(shared, layout)["tensor_inside"] == pytest.approx((32 * 4 + ends) * one)
    over_etp = terms(MIXTRAL, replace(layout, etp=2))["tensor_inside"]
    assert over_etp == pytest.approx((32 * 4 + ends) * one)
    half = replace(MIXTRAL, num_dense_layers=16)
    assert terms(half, layout)["tensor_inside"] == pytest.approx((16 * 2 + 16 * 4 + ends) * one)


def test_gradients_of_experts_are_summed_over_the_ranks_that_hold_them() -> None:
    experts = MIXTRAL.num_layers * MIXTRAL.num_expert_parameters
    others = MIXTRAL.num_parameters - experts
    layout = Layout(dp=8, ep=4, precision="bf16")
    found = terms(MIXTRAL, layout)
    sent = 2 * 7 / 8 * others + 2 * 1 / 2 * experts / 4
    assert found["data_inside"] == pytest.approx(4 * sent / 360e9)
    sharded = terms(MIXTRAL, replace(layout, zero_stage=1))
    gathered = 7 / 8 * others + 1 / 2 * experts / 4
    assert sharded["data_inside"] == pytest.approx(4 * gathered / 360e9)
    assert sharded["weights_gather"] == pytest.approx(2 * gathered / 360e9)
    assert sharded["optimizer"] == pytest.approx(38 * (others / 8 + experts / 8) / 3.35e12)
    alone = terms(MIXTRAL, replace(layout, ep=8))
    assert alone["data_inside"] == pytest.approx(4 * 2 * 7 / 8 * others / 360e9)


def test_products_of_local_experts_have_the_rows_of_all_ranks_and_fp8_inputs_are_halved() -> None:
    """ep makes fewer and longer products of the same work; etp at the same rows narrower ones."""
    layout = Layout(dp=8, precision="bf16")
    whole, spread, narrow = (
        terms(MIXTRAL, each) for each in (layout, replace(layout, ep=8), replace(layout, etp=8))
    )
    assert spread["matrices"] < whole["matrices"]
    assert narrow["matrices"] == pytest.approx(whole["matrices"], rel=0.05)
    assert spread["matrix_bytes"] < whole["matrix_bytes"]
    assert spread["elementwise"] == whole["elementwise"] < narrow["elementwise"]
    # Kept in fp8: inputs of attention's two products, and of the rows of experts: h and f.
    fp8 = Layout(precision="fp8", ep=4, dp=4)
    kept, half, in_bf16 = (
        stage_memory(each, MIXTRAL, replace(MEGATRON_LIKE, stores_narrow=in_fp8))[0]
        for each, in_fp8 in ((fp8, False), (fp8, True), (replace(fp8, precision="bf16"), True))
    )
    inputs = 4096 + 4096 + 2 * (4096 + 14336)
    assert kept.activations_bytes - half.activations_bytes == 32 * 4096 * inputs
    assert in_bf16.activations_bytes > half.activations_bytes


@pytest.mark.parametrize("model", [MIXED, MIXED.dense], ids=["experts", "dense"])
def test_every_term_is_made_once(model: ModelShape) -> None:
    for layout in FOLDED:
        expected, columns = dict.fromkeys(TERM_NAMES, 1.0), LayoutColumns.of(layout).flattened()
        blocks = DistinctBlocks.of(columns, model, H100, ANY_TRAINER, expected)
        found = list(blocks.terms(StepShape.of(columns, model, H100), slice(0, 1)))
        none = {"attention_bytes"} | ({"context"} if layout.cp == 1 else set())
        none |= {name for name in TERM_NAMES if name.startswith("exchange") and model is not MIXED}
        assert sorted(name for name, _ in found) == sorted(set(TERM_NAMES) - none)
        assert all(np.all(np.isfinite(term)) and np.all(term >= 0) for _, term in found)

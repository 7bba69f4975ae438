"""The time of a step, and the latency and bandwidth of links from timings."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from layout_tuner.predictions.estimates.link_fit import fit_link
from layout_tuner.predictions.estimates.step_time import (
    PRIOR,
    TERM_NAMES,
    step_time_parts,
    step_time_s,
    time_terms,
)
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.search_spaces.clusters.cluster import MEASURED_SOURCE
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import (
    PIPELINE_SPLITS,
    Layout,
    PipelineSplit,
    Precision,
)
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape

MACHINE = replace(
    CLUSTER_PRESETS["a100-sxm"],
    devices_per_node=4,
    peak_flops_per_s={"bf16": 100e12, "fp32": 10e12},
    memory_bandwidth_bytes_per_s=1e12,
    intra_node_bandwidth_bytes_per_s={2: 50e9, 4: 100e9},
    inter_node_bandwidth_bytes_per_s=10e9,
    host_operation_s=10e-6,
    intra_node_latency_s=1e-6,
    inter_node_latency_s=10e-6,
    source=f"{MEASURED_SOURCE} on a test's machine",
)
MODEL = ModelShape(
    name="small",
    family="gpt",
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_heads=16,
    num_kv_heads=16,
    seq_length=1024,
    vocab_size=32000,
    tied_embeddings=True,
)
TOKENS = 1024
RESIDUAL = 2 * TOKENS * 1024
"""The residual stream of a micro-batch of one sequence, in 16 bits."""
LAYER_FLOPS = 2 * 12 * 1024**2 * TOKENS
"""A block's matrices, forward."""


SPLIT_TERMS = ("imbalance", "equal_layers")
"""What stages wait for each other: for the best split, and in addition for an equal one."""


def make_layout(**knobs: Any) -> Layout:
    return Layout(**{"precision": "bf16", **knobs})


def terms_of(model: ModelShape = MODEL, **knobs: Any) -> NDArray[np.float64]:
    return time_terms(make_layout(**knobs), model, MACHINE).seconds[0]


def term(name: str, model: ModelShape = MODEL, **knobs: Any) -> float:
    return float(terms_of(model, **knobs)[TERM_NAMES.index(name)])


layouts = st.builds(
    make_layout,
    tp=st.sampled_from([1, 2, 4, 8]),
    tp_columns=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 3, 4, 8]),
    dp=st.sampled_from([1, 2, 6, 16]),
    vpp=st.sampled_from([1, 2]),
    pipeline_split=st.sampled_from(PIPELINE_SPLITS),
    micro_batch_size=st.integers(1, 16),
    num_microbatches=st.integers(1, 64),
    zero_stage=st.sampled_from([0, 1]),
    zero_replicas=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    sequence_parallel=st.booleans(),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
)


@pytest.fixture
def products_of_full_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layout_tuner.predictions.estimates.layer_products._HALF_SPEED", 0.0)


@pytest.mark.usefixtures("products_of_full_speed")
def test_matrices_and_attention_take_three_passes_and_four_if_they_are_recomputed() -> None:
    assert term("matrices") == pytest.approx(8 * 3 * LAYER_FLOPS / 100e12)
    assert term("matrices", recompute="full") == pytest.approx(8 * 4 * LAYER_FLOPS / 100e12)
    assert term("matrices", recompute="selective") == pytest.approx(term("matrices"))
    once = 8 * 4 * 1024 * 1024 * TOKENS / 100e12
    assert term("attention") == pytest.approx(3 * once)
    assert term("attention", recompute="selective") == pytest.approx(4 * once)
    assert term("attention", recompute="full") == pytest.approx(4 * once)
    flops = MODEL.model_flops_per_token * TOKENS
    total = term("matrices") + term("attention") + term("head")
    assert total == pytest.approx(flops / 100e12)


def test_fp8_is_the_speed_of_the_matrices_alone() -> None:
    """Attention, the output projection and everything that memory bounds are as in bf16."""
    machine = replace(MACHINE, peak_flops_per_s={"bf16": 100e12, "fp8": 200e12})
    bf16, fp8 = (
        time_terms(make_layout(precision=precision), MODEL, machine).seconds[0]
        for precision in ("bf16", "fp8")
    )
    ratios = dict(zip(TERM_NAMES, bf16 / np.maximum(fp8, 1e-30), strict=True))
    assert ratios["matrices"] == pytest.approx(2)
    assert {name for name, ratio in ratios.items() if ratio > 1.001} == {"matrices"}


@pytest.mark.parametrize(("precision", "moved"), [("mxfp8", 4.0625), ("nvfp4", 5.125)])
def test_inputs_and_gradients_are_quantised(precision: Precision, moved: float) -> None:
    """Of each product its input and its output's gradient: read, for nvfp4 twice, written twice."""
    machine = replace(MACHINE, peak_flops_per_s={"bf16": 100e12, precision: 200e12})
    bf16, narrow, full = (
        dict(zip(TERM_NAMES, time_terms(each, MODEL, machine).seconds[0], strict=True))
        for each in (
            make_layout(precision="bf16"),
            make_layout(precision=precision),
            make_layout(precision=precision, recompute="full"),
        )
    )
    h, f = 1024, 4096
    inputs, outputs = h + h + h + f, 3 * h + h + f + h
    casts = moved * TOKENS * 8 / machine.memory_bandwidth_bytes_per_s
    assert narrow["elementwise"] - bf16["elementwise"] == pytest.approx(casts * (inputs + outputs))
    repeated = make_layout(precision="bf16", recompute="full")
    wide = dict(zip(TERM_NAMES, time_terms(repeated, MODEL, machine).seconds[0], strict=True))
    again = full["elementwise"] - wide["elementwise"]
    assert again == pytest.approx(casts * (2 * inputs + outputs))
    assert {name for name in bf16 if narrow[name] != bf16[name]} == {"matrices", "elementwise"}


def test_weights_in_4_bits_are_gathered_in_4_bits() -> None:
    """Those of layers; the embedding is gathered in bf16, and weights in mxfp8 are."""
    peaks = dict.fromkeys(("bf16", "mxfp8", "nvfp4"), 100e12)
    machine = replace(MACHINE, peak_flops_per_s=peaks)
    kernels = kernels_of("megatron", machine)
    bf16, mxfp8, nvfp4 = (
        dict(zip(TERM_NAMES, found.seconds[0], strict=True))["weights_gather"]
        for found in (
            time_terms(
                make_layout(dp=4, zero_stage=1, precision=each), MODEL, machine, kernels=kernels
            )
            for each in ("bf16", "mxfp8", "nvfp4")
        )
    )
    share = 8 * MODEL.num_layer_parameters / MODEL.num_parameters
    assert mxfp8 == bf16
    assert nvfp4 / bf16 == pytest.approx(1 - 0.75 * share, rel=1e-3)


def test_products_with_a_small_inner_dimension_are_slower_and_reach_the_device_s_share() -> None:
    """Forward [rows, inner] x [inner, columns]; backward the inner ones are columns and rows."""
    h, f, tp = 1024, 4096, 2
    seconds = 0.0
    for inner, columns in ((h, 3 * h / tp), (h / tp, h), (h, f / tp), (f / tp, h)):
        for summed in (inner, columns, TOKENS):
            seconds += 2 * TOKENS * inner * columns * (1 + 100 / summed) / 100e12
    assert term("matrices", tp=tp) == pytest.approx(8 * seconds)
    on_paper = replace(MACHINE, source="a data sheet")
    for machine, share in ((on_paper, 0.9), (replace(on_paper, device="some accelerator"), 0.8)):
        slower = time_terms(make_layout(), MODEL, machine).seconds[0]
        assert term("matrices") == pytest.approx(share * slower[TERM_NAMES.index("matrices")])


def test_a_pipeline_adds_its_bubble_and_interleaving_cuts_it() -> None:
    plain, piped = term("matrices", num_microbatches=8), {"pp": 4, "num_microbatches": 8}
    assert term("matrices", **piped) == pytest.approx(plain / 4 * (8 + 3) / 8)
    assert term("matrices", **piped, vpp=2) == pytest.approx(plain / 4 * (8 + 1.5) / 8)


def test_weights_and_activations_pass_through_memory() -> None:
    weights = 12 * 1024**2
    activations = TOKENS * (4 * 1024 + (3 + 1 + 4 + 4) * 1024 - 3 * 1024 + 3 * 1024)
    passed_s = 8 * 3 * 2 * (weights + activations) / 1e12
    assert term("matrix_bytes") == pytest.approx(passed_s, rel=0.1)
    # Sequence parallelism shares the element-wise work of the residual stream.
    shared = term("elementwise", tp=4) - term("elementwise", tp=4, sequence_parallel=True)
    assert shared == pytest.approx(8 * 3 * 10 * RESIDUAL / 1e12 * 3 / 4)


ALL_REDUCES = 4 * 8 + 2
"""Of tensor parallelism: four a block, and two more."""
NORM_BYTES, AGAIN = (8 * 2 + 1) * TOKENS * 2 * (8 + 4), 8 * 2 * TOKENS * 2 * 8
"""Of 17 norms: two numbers a token, in fp64 forward; and of those that are recomputed."""
GRADIENTS, WEIGHTS = 4 * MODEL.num_parameters, 2 * MODEL.num_parameters
ACROSS = 4**0.85 * 10e9
"""Bandwidth between nodes of the four cards of a node."""
PIPED = {"pp": 4, "num_microbatches": 8}
NEIGHBOURS = {**PIPED, "pp": 8, "dp": 2, "rank_order": "tp_cp_pp_dp"}
FULL, ZERO_3 = {"recompute": "full"}, {"zero_stage": 3}
FOUR = {"dp": 8, "num_microbatches": 4}


@pytest.mark.parametrize(
    ("name", "knobs", "expected_s"),
    [
        # The bandwidth inside a node is that of the degree.
        ("tensor_inside", {"tp": 2}, ALL_REDUCES * RESIDUAL / 50e9),
        ("tensor_inside", {"tp": 4}, ALL_REDUCES * 2 * 3 / 4 * RESIDUAL / 100e9),
        ("tensor_across", {"tp": 4}, 0),
        ("tensor_inside", {"tp": 4, **FULL}, (6 * 8 + 2) * 2 * 3 / 4 * RESIDUAL / 100e9),
        # A group across nodes has the cards of all its ranks.
        ("tensor_across", {"tp": 8}, ALL_REDUCES * 2 * 7 / 8 * RESIDUAL / (4 * 10e9)),
        ("tensor_inside", {"tp": 8}, 0),
        # Tensor columns sum what tp divides, 12 residual streams a block, and norms; the ends
        # scatter and gather two each. What tp sums is divided by them but for the head's gradient,
        # and goes as far apart as they are many.
        ("tensor_inside", {"tp_columns": 2}, ((12 * 8 + 2) * RESIDUAL + NORM_BYTES) / 50e9),
        (
            "tensor_inside",
            {"tp_columns": 2, **FULL},
            ((19 * 8 + 2) * RESIDUAL + NORM_BYTES + AGAIN) / 50e9,
        ),
        (
            "tensor_inside",
            {"tp": 2, "tp_columns": 2},
            ((33 / 2 + 1 + 12 * 8 / 2 + 2) * RESIDUAL + NORM_BYTES) / 50e9,
        ),
        ("tensor_across", {"tp": 2, "tp_columns": 4}, (33 / 4 + 1) * RESIDUAL / 10e9),
        # Four sums of products and four of norms a block, four at the ends, two of the last norm.
        ("latency_inside", {"tp_columns": 4}, (8 * 8 + 6) * (40e-6 + 6 * 1e-6)),
        ("pipeline_across", {**PIPED, "tp_columns": 2}, 11 * RESIDUAL / 10e9),
        # A collective costs a latency for each step around the ring.
        ("latency_inside", {"tp": 4}, ALL_REDUCES * (40e-6 + 6 * 1e-6)),
        # On two nodes one of seven steps leaves a node, each way around.
        ("latency_across", {"tp": 8}, ALL_REDUCES * (40e-6 + 2 * 10e-6 + 12 * 1e-6)),
        # Stages send their boundaries each way.
        ("pipeline_inside", PIPED, 2 * 11 * RESIDUAL / 50e9),
        ("pipeline_inside", {**PIPED, "vpp": 2}, 2 * 2 * 9.5 * RESIDUAL / 50e9),
        ("pipeline_across", {**PIPED, "dp": 2}, 2 * 11 * RESIDUAL / 10e9),
        # Of neighbouring stages on nodes of four, one boundary leaves the node: a card per rank.
        ("pipeline_across", NEIGHBOURS, 15 * RESIDUAL * (1 / 50e9 + 1 / (10e9 * 4**0.85))),
        ("pipeline_across", {**NEIGHBOURS, "tp": 4}, 2 * 15 * RESIDUAL / 10e9),
        ("weights_gather", {"dp": 8}, 0),
    ],
)
def test_communication_takes_the_bytes_over_the_bandwidth(
    name: str, knobs: dict[str, Any], expected_s: float
) -> None:
    assert term(name, **knobs) == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("name", "knobs", "expected_s"),
    [
        # Gradients are reduced in fp32, inside and across nodes.
        ("data_inside", {"dp": 4}, GRADIENTS * 2 * 3 / 4 / 100e9),
        ("data_across", {"dp": 8}, GRADIENTS * 2 * 7 / 8 / ACROSS),
        ("data_congestion", {"dp": 8}, GRADIENTS * 2 * 7 / 8 / ACROSS),
        # ZeRO scatters half as much, and gathers the weights.
        ("data_across", {"dp": 8, "zero_stage": 1}, GRADIENTS * 7 / 8 / ACROSS),
        ("weights_gather", {"dp": 8, "zero_stage": 1}, WEIGHTS * 7 / 8 / ACROSS),
        # Stages 2 and 3 scatter for every micro-batch. 3 gathers for every pass, not after a step.
        ("data_across", {**FOUR, "zero_stage": 2}, 4 * GRADIENTS * 7 / 8 / ACROSS),
        ("weights_gather", {"dp": 8, "zero_stage": 2}, WEIGHTS * 7 / 8 / ACROSS),
        ("data_across", {**FOUR, **ZERO_3}, 4 * (GRADIENTS + 2 * WEIGHTS) * 7 / 8 / ACROSS),
        ("weights_gather", {"dp": 8, "zero_stage": 3}, 0),
        # Copies of the shards are reduced beside.
        (
            "data_across",
            {"dp": 8, "zero_stage": 1, "zero_replicas": 2},
            GRADIENTS * (3 / 4 + 2 * 1 / 2 / 4) / ACROSS,
        ),
        # The optimizer works on its shard.
        ("optimizer", {"dp": 4}, 38 * MODEL.num_parameters / 1e12),
        ("optimizer", {"dp": 4, "zero_stage": 1}, 38 * MODEL.num_parameters / 1e12 / 4),
    ],
)
def test_what_goes_over_all_parameters_takes_their_bytes_over_the_bandwidth(
    name: str, knobs: dict[str, Any], expected_s: float
) -> None:
    assert term(name, **knobs) == pytest.approx(expected_s, rel=0.01)
    half = term("data_across", dp=8) / 2
    assert term("data_across", dp=8, zero_stage=1) == pytest.approx(half), "ZeRO's, exactly"


@pytest.mark.parametrize(
    ("comm_type", "elements", "steps"),
    # Keys and values three times; queries, keys, values and outputs twice, of each other rank.
    [("all_gather", 6 * 3 / 4, 3), ("a2a", 8 * 3 / 16, 4)],
)
def test_context_parallelism_sends_its_rows(comm_type: str, elements: float, steps: int) -> None:
    sent_s = elements * RESIDUAL / 100e9
    found = term("context", cp=4, cp_comm_type=comm_type, num_microbatches=2)
    assert found == pytest.approx(8 * 2 * (sent_s + steps * (4e-5 + 3 * 1e-6)))


def test_an_exchange_of_context_grows_with_the_heads() -> None:
    wide = replace(MODEL, head_dim=2 * MODEL.head_size)
    knobs = {"cp": 4, "cp_comm_type": "a2a", "num_microbatches": 2}
    exchanged = [term("context", each, **knobs) for each in (MODEL, wide)]
    latency_s = 8 * 2 * 4 * (4e-5 + 3 * 1e-6)
    assert exchanged[1] - latency_s == pytest.approx(2 * (exchanged[0] - latency_s))


def test_one_rank_sends_no_context() -> None:
    assert term("context", num_microbatches=2) == 0


def test_a_ring_of_context_hides_its_steps_beside_attention() -> None:
    assert 0 < term("context", cp=4, cp_comm_type="p2p") < term("context", cp=4)
    long = replace(MODEL, seq_length=32768)
    attention = term("attention", long, cp=4, cp_comm_type="p2p")
    assert term("context", long, cp=4, cp_comm_type="p2p") < 0.1 * attention


@pytest.mark.parametrize("name", ["matrices", "attention", "elementwise", "logits"])
def test_context_parallelism_cuts_the_work_on_rows(name: str) -> None:
    share = term(name, cp=4) / term(name)
    assert share == pytest.approx(0.25, rel=0.1)  # fewer rows are slower


@pytest.mark.parametrize(
    ("name", "knobs", "alike"),
    [
        ("optimizer", {"cp": 4}, {}),
        ("data_inside", {"cp": 4}, {"dp": 4}),
        ("optimizer", {"cp": 4, "zero_stage": 1}, {"dp": 4, "zero_stage": 1}),
    ],
)
def test_context_parallelism_shards_like_data_parallelism(
    name: str, knobs: dict[str, int], alike: dict[str, int]
) -> None:
    assert term(name, **knobs) == term(name, **alike)


def test_tensor_columns_cut_products_and_weights_and_leave_attention_alone() -> None:
    for name in ("matrices", "logits", "head", "optimizer"):
        assert term(name, tp_columns=4) / term(name) == pytest.approx(0.25, rel=0.1), name
    assert term("attention", tp_columns=4) == term("attention")
    assert term("data_inside", tp_columns=2, dp=2) == term("data_inside", tp=2, dp=2)
    shared = term("elementwise") - term("elementwise", tp_columns=4)
    assert shared == pytest.approx(8 * 3 * 10 * RESIDUAL / 1e12 * 3 / 4)


@pytest.mark.parametrize(
    ("knobs", "lost_s"),
    [
        # No longer than the products of half of the weights (7 of a block's 12 H^2), or the sums:
        # with sequence parallelism two scatters of a block.
        ({"tp": 2}, 8 * LAYER_FLOPS * 7 / 12 / 2 / 100e12),
        ({"tp": 2, "sequence_parallel": True}, 8 * RESIDUAL / 50e9),
        ({"tp_columns": 2}, 8 * LAYER_FLOPS * 5 / 12 / 2 / 100e12),
        ({"dp": 2}, 0),
    ],
)
def test_late_weight_gradients_hide_no_sum(knobs: dict[str, Any], lost_s: float) -> None:
    """A sum of input gradients runs beside the product of the weight gradient, if there is one."""
    lost = term("tensor_inside", schedule="zero_bubble", **knobs) - term("tensor_inside", **knobs)
    assert lost == pytest.approx(lost_s)
    # Sequence parallelism leaves no product beside the sum over columns.
    both = {"tp": 2, "tp_columns": 2}
    lost = term("tensor_inside", **both, sequence_parallel=True) - term("tensor_inside", **both)
    shared = NORM_BYTES / 2 + RESIDUAL / 2  # norms and head have half of the tokens
    assert lost == pytest.approx(8 * LAYER_FLOPS * 5 / 12 / 4 / 100e12 - shared / 50e9)


def test_uneven_layers_wait_for_the_fullest_stage_and_equal_ones_for_the_output() -> None:
    knobs = {"pp": 4, "num_microbatches": 9}
    even = replace(MODEL, num_layers=8, vocab_size=1)
    one_layer = term("matrices", even) / 8
    assert term("imbalance", even, **knobs) < 8 * 0.1 * one_layer
    assert term("imbalance", replace(even, num_layers=9), **knobs) > 8 * 0.75 * one_layer
    wide = replace(MODEL, vocab_size=200_000, num_layers=32)
    assert term("equal_layers", wide, **knobs) > 0
    assert [term(name, wide, num_microbatches=9) for name in SPLIT_TERMS] == [0, 0]


@pytest.mark.parametrize("split", PIPELINE_SPLITS)
def test_steps_and_the_optimizer_wait_for_the_fullest_of_all_stages_of_any_split(
    split: PipelineSplit,
) -> None:
    embedding, head = Layout(pp=2, pipeline_split=split).counted_ends
    for pp, vocab_size in itertools.product((2, 4, 8), (1024, 200_000)):
        knobs = {"pp": pp, "pipeline_split": split}
        model = replace(MODEL, vocab_size=vocab_size, num_layers=4 * pp - embedding - head)
        layout = make_layout(**knobs)
        layers = [len(layout.layers_of_stage(stage, model.num_layers)) for stage in range(pp)]
        parts = dict(zip(TERM_NAMES, PRIOR * terms_of(model, num_microbatches=1), strict=True))
        blocks = ("matrices", "attention", "attention_bytes", "matrix_bytes", "elementwise")
        layer_s = sum(parts[name] for name in (*blocks, "kernels")) / model.num_layers
        stages = [each * layer_s for each in layers]
        stages[-1] += parts["head"] + parts["logits"]
        waiting = 8 * (max(stages) - sum(stages) / pp)
        terms = [term(name, model, num_microbatches=9, **knobs) for name in SPLIT_TERMS]
        assert sum(terms) == pytest.approx(waiting, abs=1e-9)

        untied = replace(model, tied_embeddings=False)
        held = [model.num_layer_parameters * each for each in layers]
        held[0] += untied.num_embedding_parameters
        held[-1] += untied.num_head_parameters
        assert term("optimizer", untied, **knobs) == pytest.approx(38 * max(held) / 1e12)


def test_the_host_and_a_reduction_hide_behind_long_passes_of_the_devices() -> None:
    def cost(size: int) -> float:
        fast = replace(MACHINE, host_operation_s=1e-12)
        layout = make_layout(tp=4, micro_batch_size=size)
        slow_s, fast_s = (step_time_s(layout, MODEL, c)[0] for c in (MACHINE, fast))
        return float(slow_s / fast_s)

    assert cost(64) < 1.02
    assert cost(1) > 1.25

    def waited(microbatch: int) -> float:
        parts = step_time_parts(make_layout(dp=8, micro_batch_size=microbatch), MODEL, MACHINE)
        return sum(part.seconds for part in parts if part.name == "data_across")

    assert waited(256) < 0.5 * waited(1)


@settings(max_examples=40)
@given(
    layouts, st.sampled_from(TERM_NAMES), st.sampled_from(["micro_batch_size", "num_microbatches"])
)
def test_terms_are_finite_parts_of_the_step_which_grows_with_factors_and_sequences(
    layout: Layout, name: str, knob: str
) -> None:
    terms = time_terms(layout, MODEL, MACHINE)
    assert np.all(np.isfinite(terms.seconds))
    assert np.all(terms.seconds >= 0)
    (step_s,) = terms.step_time_s()
    assert step_s > 0
    parts = step_time_parts(layout, MODEL, MACHINE)
    assert sum(part.seconds for part in parts) == pytest.approx(step_s)
    raised = PRIOR.copy()
    raised[TERM_NAMES.index(name)] *= 1.5
    assert terms.step_time_s(raised)[0] >= step_s * (1 - 1e-12)
    more = replace(layout, **{knob: 2 * getattr(layout, knob)})
    assert step_time_s(more, MODEL, MACHINE)[0] > step_s
    # Shares are the derivatives of the logarithm.
    shares, step = terms.shares()[0], 1e-4
    for place in range(len(TERM_NAMES)):
        moved = np.ones(len(TERM_NAMES))
        moved[place] = np.exp(step)
        change = np.log(terms.step_time_s(PRIOR * moved) / terms.step_time_s(PRIOR / moved))[0]
        assert shares[place] == pytest.approx(change / (2 * step), abs=1e-6)


@settings(max_examples=30)
@given(st.lists(layouts, min_size=2, max_size=8), st.integers(0, 9))
def test_columns_give_what_each_layout_gives_and_draws_what_each_factor_gives(
    several: list[Layout], seed: int
) -> None:
    columns = LayoutColumns.of_each(several)
    one_by_one = [step_time_s(layout, MODEL, MACHINE)[0] for layout in several]
    assert step_time_s(columns, MODEL, MACHINE) == pytest.approx(one_by_one, rel=1e-12)
    terms = time_terms(columns, MODEL, MACHINE)
    assert terms.step_time_s() == pytest.approx(one_by_one, rel=1e-12)
    factors = PRIOR * np.exp(np.random.default_rng(seed).normal(size=(3, len(PRIOR))))
    each_draw = np.array([terms.step_time_s(each) for each in factors])
    assert terms.drawn_step_times_s(factors) == pytest.approx(each_draw, rel=1e-14)


def test_a_grid_of_columns_is_taken_as_all_its_layouts() -> None:
    one = LayoutColumns.of(make_layout())
    grid = replace(one, tp=np.array([[1], [2]]), dp=np.array([[1, 2, 4]]))
    layouts = [make_layout(tp=tp, dp=dp) for tp in (1, 2) for dp in (1, 2, 4)]
    expected = [step_time_s(layout, MODEL, MACHINE)[0] for layout in layouts]
    assert step_time_s(grid, MODEL, MACHINE) == pytest.approx(expected)
    unknown = replace(MACHINE, peak_flops_per_s={}, memory_bandwidth_bytes_per_s=2e12)
    assert step_time_s(layouts[0], MODEL, unknown)[0] > 0, "it is taken for one like its memory"


SIZES = [float(1 << power) for power in range(10, 25, 2)]


def timings(latency_s: float, bytes_per_s: float) -> list[float]:
    return [latency_s + size / bytes_per_s for size in SIZES]


def test_a_line_without_noise_gives_its_constants_back() -> None:
    for latency_s, bytes_per_s in ((1e-6, 1e11), (60e-6, 2e9), (5e-3, 3e8), (1e-5, 1e12)):
        fit = fit_link(SIZES, timings(latency_s, bytes_per_s))
        assert fit.latency_s == pytest.approx(latency_s, rel=1e-3)
        assert fit.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-3)
        assert fit.error < 1e-3
    with pytest.raises(ValueError, match="fit no line"):
        fit_link([1024.0, 1024.0], [1e-3, 1.1e-3])


def test_noise_of_a_tenth_moves_the_constants_by_no_more_and_shows_in_the_error() -> None:
    rng = random.Random(5)
    noisy = [seconds * rng.lognormvariate(0, 0.1) for seconds in timings(50e-6, 1e9)]
    fit = fit_link(SIZES, noisy)
    assert fit.latency_s == pytest.approx(50e-6, rel=0.15)
    assert fit.bytes_per_s == pytest.approx(1e9, rel=0.15)
    assert 0.03 < fit.error < 0.2
    jumps = [
        t * (10 if size > 1e5 else 1) for size, t in zip(SIZES, timings(1e-3, 1e9), strict=True)
    ]
    assert fit_link(SIZES, jumps).error > 0.3

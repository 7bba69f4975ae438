from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.estimates.time import (
    FACTOR_PRIORS,
    PRIOR,
    TERM_NAMES,
    step_time_parts,
    step_time_s,
    time_terms,
)
from search_spaces.spec.cluster import MEASURED_SOURCE
from search_spaces.spec.layout import LAYOUT_FIELDS, PIPELINE_SPLITS, Layout, PipelineSplit
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS

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
RESIDUAL_BYTES = 2 * TOKENS * 1024
"""The residual stream of a micro-batch of one sequence, in 16 bits."""
LAYER_FLOPS = 2 * 12 * 1024**2 * TOKENS
"""A block's matrices, forward."""


SPLIT_TERMS = ("imbalance", "equal_layers")
"""What stages wait for each other: for the best split, and in addition for an equal one."""


def make_layout(**knobs: Any) -> Layout:
    return Layout(**{"precision": "bf16", **knobs})


def term(name: str, model: ModelShape = MODEL, **knobs: Any) -> float:
    terms = time_terms(make_layout(**knobs), model, MACHINE)
    return float(terms.seconds[0, TERM_NAMES.index(name)])


def seconds(model: ModelShape = MODEL, **knobs: Any) -> float:
    return float(step_time_s(make_layout(**knobs), model, MACHINE)[0])


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
    monkeypatch.setattr("search_spaces.estimates.time_terms._HALF_SPEED", 0.0)


@pytest.mark.usefixtures("products_of_full_speed")
def test_matrices_take_three_passes_and_four_with_full_recomputation() -> None:
    assert term("matrices") == pytest.approx(8 * 3 * LAYER_FLOPS / 100e12)
    assert term("matrices", recompute="full") == pytest.approx(8 * 4 * LAYER_FLOPS / 100e12)
    assert term("matrices", recompute="selective") == pytest.approx(term("matrices"))


def test_fp8_is_the_speed_of_the_matrices_alone() -> None:
    """Attention, the output projection and everything that memory bounds are as in bf16."""
    machine = replace(MACHINE, peak_flops_per_s={"bf16": 100e12, "fp8": 200e12})
    terms = {
        precision: time_terms(make_layout(precision=precision), MODEL, machine).seconds[0]
        for precision in ("bf16", "fp8")
    }
    ratios = dict(zip(TERM_NAMES, terms["bf16"] / np.maximum(terms["fp8"], 1e-30), strict=True))
    faster = {name for name, ratio in ratios.items() if ratio > 1.001}
    assert ratios["matrices"] == pytest.approx(2)
    assert faster == {"matrices"}


def test_attention_is_recomputed_selectively_too() -> None:
    once = 8 * 4 * 1024 * 1024 * TOKENS / 100e12
    assert term("attention") == pytest.approx(3 * once)
    assert term("attention", recompute="selective") == pytest.approx(4 * once)
    assert term("attention", recompute="full") == pytest.approx(4 * once)


def test_products_with_a_small_inner_dimension_are_slower() -> None:
    """Forward [rows, inner] x [inner, columns]; backward the inner ones are columns and rows."""
    h, f, tp = 1024, 4096, 2
    seconds = 0.0
    for inner, columns in ((h, 3 * h / tp), (h / tp, h), (h, f / tp), (f / tp, h)):
        for summed in (inner, columns, TOKENS):
            seconds += 2 * TOKENS * inner * columns * (1 + 100 / summed) / 100e12
    assert term("matrices", tp=tp) == pytest.approx(8 * seconds)


def test_the_share_of_the_peak_that_products_reach_is_that_of_the_device() -> None:
    on_paper = replace(MACHINE, source="a data sheet")
    slower = time_terms(make_layout(), MODEL, on_paper).seconds[0, TERM_NAMES.index("matrices")]
    assert term("matrices") == pytest.approx(0.9 * slower), "A100"
    other = replace(on_paper, device="some accelerator")
    slower = time_terms(make_layout(), MODEL, other).seconds[0, TERM_NAMES.index("matrices")]
    assert term("matrices") == pytest.approx(0.8 * slower)


@pytest.mark.usefixtures("products_of_full_speed")
def test_model_flops_are_those_of_the_shape() -> None:
    flops = MODEL.model_flops_per_token * TOKENS
    total = term("matrices") + term("attention") + term("head")
    assert total == pytest.approx(flops / 100e12)


def test_a_pipeline_adds_its_bubble_and_interleaving_cuts_it() -> None:
    plain, piped = term("matrices", num_microbatches=8), {"pp": 4, "num_microbatches": 8}
    assert term("matrices", **piped) == pytest.approx(plain / 4 * (8 + 3) / 8)
    assert term("matrices", **piped, vpp=2) == pytest.approx(plain / 4 * (8 + 1.5) / 8)


def test_weights_and_activations_pass_through_memory() -> None:
    weights = 12 * 1024**2
    activations = TOKENS * (4 * 1024 + (3 + 1 + 4 + 4) * 1024 - 3 * 1024 + 3 * 1024)
    assert term("matrix_bytes") == pytest.approx(
        8 * 3 * 2 * (weights + activations) / 1e12, rel=0.1
    )


def test_sequence_parallelism_shares_the_element_wise_work_of_the_residual_stream() -> None:
    shared = term("elementwise", tp=4, sequence_parallel=True)
    replicated = term("elementwise", tp=4)
    residual = 8 * 3 * 10 * RESIDUAL_BYTES / 1e12
    assert replicated - shared == pytest.approx(residual * 3 / 4)


ALL_REDUCES = 4 * 8 + 2
"""Of tensor parallelism: four a block, and two more."""
NORM_BYTES, AGAIN = (8 * 2 + 1) * TOKENS * 2 * (8 + 4), 8 * 2 * TOKENS * 2 * 8
"""Of 17 norms: two numbers a token, in fp64 forward; and of those that are recomputed."""
GRADIENTS, WEIGHTS = 4 * MODEL.num_parameters, 2 * MODEL.num_parameters
ACROSS = 4**0.85 * 10e9
"""Bandwidth between nodes of the four cards of a node."""
PIPED = {"pp": 4, "num_microbatches": 8}


@pytest.mark.parametrize(
    ("name", "knobs", "expected_s"),
    [
        # The bandwidth inside a node is that of the degree.
        ("tensor_inside", {"tp": 2}, ALL_REDUCES * RESIDUAL_BYTES / 50e9),
        ("tensor_inside", {"tp": 4}, ALL_REDUCES * 2 * 3 / 4 * RESIDUAL_BYTES / 100e9),
        ("tensor_across", {"tp": 4}, 0),
        (
            "tensor_inside",
            {"tp": 4, "recompute": "full"},
            (6 * 8 + 2) * 2 * 3 / 4 * RESIDUAL_BYTES / 100e9,
        ),
        # A group across nodes has the cards of all its ranks.
        ("tensor_across", {"tp": 8}, ALL_REDUCES * 2 * 7 / 8 * RESIDUAL_BYTES / (4 * 10e9)),
        ("tensor_inside", {"tp": 8}, 0),
        # Tensor columns sum what tp divides, 12 residual streams a block, and norms; the ends
        # scatter and gather two each. What tp sums is divided by them but for the head's gradient,
        # and goes as far apart as they are many.
        ("tensor_inside", {"tp_columns": 2}, ((12 * 8 + 2) * RESIDUAL_BYTES + NORM_BYTES) / 50e9),
        (
            "tensor_inside",
            {"tp_columns": 2, "recompute": "full"},
            ((19 * 8 + 2) * RESIDUAL_BYTES + NORM_BYTES + AGAIN) / 50e9,
        ),
        (
            "tensor_inside",
            {"tp": 2, "tp_columns": 2},
            ((33 / 2 + 1 + 12 * 8 / 2 + 2) * RESIDUAL_BYTES + NORM_BYTES) / 50e9,
        ),
        (
            "tensor_across",
            {"tp": 2, "tp_columns": 4},
            (33 / 4 + 1) * RESIDUAL_BYTES / 10e9,
        ),
        # Four sums of products and four of norms a block, four at the ends, two of the last norm.
        ("latency_inside", {"tp_columns": 4}, (8 * 8 + 6) * (40e-6 + 6 * 1e-6)),
        ("pipeline_across", {**PIPED, "tp_columns": 2}, 11 * RESIDUAL_BYTES / 10e9),
        # A collective costs a latency for each step around the ring.
        ("latency_inside", {"tp": 4}, ALL_REDUCES * (40e-6 + 6 * 1e-6)),
        ("latency_across", {"tp": 8}, ALL_REDUCES * (40e-6 + 14 * 10e-6)),
        # Stages send their boundaries each way.
        ("pipeline_inside", PIPED, 2 * 11 * RESIDUAL_BYTES / 50e9),
        ("pipeline_inside", {**PIPED, "vpp": 2}, 2 * 2 * 9.5 * RESIDUAL_BYTES / 50e9),
        ("pipeline_across", {**PIPED, "dp": 2}, 2 * 11 * RESIDUAL_BYTES / 10e9),
        # Of neighbouring stages on nodes of four, one boundary leaves the node: a card per rank.
        (
            "pipeline_across",
            {**PIPED, "pp": 8, "dp": 2, "rank_order": "tp_cp_pp_dp"},
            15 * RESIDUAL_BYTES * (1 / 50e9 + 1 / (10e9 * 4**0.85)),
        ),
        (
            "pipeline_across",
            {**PIPED, "pp": 8, "dp": 2, "tp": 4, "rank_order": "tp_cp_pp_dp"},
            2 * 15 * RESIDUAL_BYTES / 10e9,
        ),
        ("weights_gather", {"dp": 8}, 0),
    ],
)
def test_communication_takes(name: str, knobs: dict[str, Any], expected_s: float) -> None:
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
        (
            "data_across",
            {"dp": 8, "zero_stage": 2, "num_microbatches": 4},
            4 * GRADIENTS * 7 / 8 / ACROSS,
        ),
        ("weights_gather", {"dp": 8, "zero_stage": 2}, WEIGHTS * 7 / 8 / ACROSS),
        (
            "data_across",
            {"dp": 8, "zero_stage": 3, "num_microbatches": 4},
            4 * (GRADIENTS + 2 * WEIGHTS) * 7 / 8 / ACROSS,
        ),
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
def test_what_goes_over_all_parameters_takes(
    name: str, knobs: dict[str, Any], expected_s: float
) -> None:
    assert term(name, **knobs) == pytest.approx(expected_s, rel=0.01)


def test_zero_scatters_exactly_half_as_much() -> None:
    assert term("data_across", dp=8, zero_stage=1) == pytest.approx(term("data_across", dp=8) / 2)


@pytest.mark.parametrize(
    ("comm_type", "elements", "steps"),
    # Keys and values three times; queries, keys, values and outputs twice, of each other rank.
    [("all_gather", 3 * 2 * (4 - 1) / 4, 3), ("a2a", 2 * 4 * (4 - 1) / 16, 4)],
)
def test_context_parallelism_takes(comm_type: str, elements: float, steps: int) -> None:
    slots = MODEL.num_layers * 2
    sent_s = elements * RESIDUAL_BYTES / 100e9
    expected_s = slots * (sent_s + steps * (4e-5 + 3 * 1e-6))
    found = term("context", cp=4, cp_comm_type=comm_type, num_microbatches=2)
    assert found == pytest.approx(expected_s)
    assert term("context", num_microbatches=2) == 0


def test_tensor_columns_cut_products_and_weights_and_leave_attention_alone() -> None:
    for name in ("matrices", "logits", "head", "optimizer"):
        assert term(name, tp_columns=4) / term(name) == pytest.approx(0.25, rel=0.1), name
    assert term("attention", tp_columns=4) == term("attention")
    assert term("data_inside", tp_columns=2, dp=2) == term("data_inside", tp=2, dp=2)
    shared = term("elementwise") - term("elementwise", tp_columns=4)
    assert shared == pytest.approx(8 * 3 * 10 * RESIDUAL_BYTES / 1e12 * 3 / 4)


@pytest.mark.parametrize(
    ("knobs", "lost_s"),
    [
        # No longer than the products of half of the weights (7 of a block's 12 H^2), or the sums:
        # with sequence parallelism two scatters of a block.
        ({"tp": 2}, 8 * LAYER_FLOPS * 7 / 12 / 2 / 100e12),
        ({"tp": 2, "sequence_parallel": True}, 8 * RESIDUAL_BYTES / 50e9),
        ({"tp_columns": 2}, 8 * LAYER_FLOPS * 5 / 12 / 2 / 100e12),
        ({"dp": 2}, 0),
    ],
)
def test_late_weight_gradients_hide_no_sum(knobs: dict[str, Any], lost_s: float) -> None:
    """A sum of input gradients runs beside the product of the weight gradient, if there is one."""
    lost = term("tensor_inside", schedule="zero_bubble", **knobs) - term("tensor_inside", **knobs)
    assert lost == pytest.approx(lost_s)


def test_sequence_parallelism_leaves_no_product_beside_the_sum_over_columns() -> None:
    both = {"tp": 2, "tp_columns": 2}
    lost = term("tensor_inside", **both, sequence_parallel=True) - term("tensor_inside", **both)
    shared = NORM_BYTES / 2 + RESIDUAL_BYTES / 2  # norms and head have half of the tokens
    assert lost == pytest.approx(8 * LAYER_FLOPS * 5 / 12 / 4 / 100e12 - shared / 50e9)


def test_a_ring_hides_its_steps_beside_attention() -> None:
    ring = term("context", cp=4, cp_comm_type="p2p")
    assert 0 < ring < term("context", cp=4)
    long = replace(MODEL, seq_length=32768)
    attention = term("attention", long, cp=4, cp_comm_type="p2p")
    assert term("context", long, cp=4, cp_comm_type="p2p") < 0.1 * attention


def test_context_parallelism_cuts_everything_but_the_weights() -> None:
    for name in ("matrices", "attention", "elementwise", "logits"):
        share = term(name, cp=4) / term(name)
        assert share == pytest.approx(0.25, rel=0.1), name  # fewer rows are slower
    assert term("optimizer", cp=4) == term("optimizer")
    assert term("data_inside", cp=4) == term("data_inside", dp=4)
    assert term("optimizer", cp=4, zero_stage=1) == term("optimizer", dp=4, zero_stage=1)


def test_uneven_layers_wait_for_the_fullest_stage() -> None:
    knobs = {"pp": 4, "num_microbatches": 9}
    even = replace(MODEL, num_layers=8, vocab_size=1)
    uneven = replace(even, num_layers=9)
    one_layer = term("matrices", even) / 8
    assert term("imbalance", even, **knobs) < 8 * 0.1 * one_layer
    assert term("imbalance", uneven, **knobs) > 8 * 0.75 * one_layer


def test_equal_layers_wait_for_the_output_and_a_better_split_less() -> None:
    knobs = {"pp": 4, "num_microbatches": 9}
    wide = replace(MODEL, vocab_size=200_000, num_layers=32)
    assert term("equal_layers", wide, **knobs) > 0
    assert term("equal_layers", wide, num_microbatches=9) == 0
    assert term("imbalance", wide, num_microbatches=9) == 0


@pytest.mark.parametrize("split", PIPELINE_SPLITS)
@pytest.mark.parametrize("pp", [2, 4, 8])
def test_equal_layers_wait_for_the_slowest_of_all_stages_of_any_split(
    split: PipelineSplit, pp: int
) -> None:
    embedding, head = Layout(pp=pp, pipeline_split=split).counted_ends
    knobs = {"pp": pp, "pipeline_split": split}
    for vocab_size in (1024, 200_000):
        model = replace(MODEL, vocab_size=vocab_size, num_layers=4 * pp - embedding - head)
        layers = [len(make_layout(**knobs).layers_of_stage(i, model.num_layers)) for i in range(pp)]
        parts = {name: term(name, model, num_microbatches=1) for name in TERM_NAMES}
        blocks = ("matrices", "attention", "attention_bytes", "matrix_bytes", "elementwise")
        layer_s = sum(FACTOR_PRIORS[name].median * parts[name] for name in (*blocks, "kernels"))
        layer_s /= model.num_layers
        head_s = sum(FACTOR_PRIORS[name].median * parts[name] for name in ("head", "logits"))
        stages = [each * layer_s for each in layers]
        stages[-1] += head_s
        waiting = 8 * (max(stages) - sum(stages) / pp)
        terms = [term(name, model, num_microbatches=9, **knobs) for name in SPLIT_TERMS]
        assert sum(terms) == pytest.approx(waiting, abs=1e-9)


@pytest.mark.parametrize("split", PIPELINE_SPLITS)
@pytest.mark.parametrize("pp", [2, 4])
def test_the_optimizer_waits_for_the_rank_with_the_most_parameters(
    split: PipelineSplit, pp: int
) -> None:
    embedding, head = Layout(pp=pp, pipeline_split=split).counted_ends
    for vocab_size in (1024, 200_000):
        model = replace(
            MODEL,
            vocab_size=vocab_size,
            num_layers=4 * pp - embedding - head,
            tied_embeddings=False,
        )
        layout = make_layout(pp=pp, pipeline_split=split)
        held = [
            model.num_layer_parameters * len(layout.layers_of_stage(stage, model.num_layers))
            for stage in range(pp)
        ]
        held[0] += model.num_embedding_parameters
        held[-1] += model.num_head_parameters
        found = term("optimizer", model, pp=pp, pipeline_split=split)
        assert found == pytest.approx(38 * max(held) / 1e12)


def test_the_host_hides_behind_the_devices_until_it_is_slower() -> None:
    def cost(size: int) -> float:
        fast = replace(MACHINE, host_operation_s=1e-12)
        layout = make_layout(tp=4, micro_batch_size=size)
        slow_s, fast_s = (step_time_s(layout, MODEL, c)[0] for c in (MACHINE, fast))
        return float(slow_s / fast_s)

    assert cost(64) < 1.02
    assert cost(1) > 1.25


def test_a_reduction_hides_behind_a_long_backward_pass() -> None:
    def waited(microbatch: int) -> float:
        parts = step_time_parts(make_layout(dp=8, micro_batch_size=microbatch), MODEL, MACHINE)
        return sum(part.seconds for part in parts if part.name == "data_across")

    assert waited(256) < 0.5 * waited(1)


def test_draws_of_the_factors_give_the_steps_of_each_draw_to_the_bit() -> None:
    kinds = [make_layout(dp=8), make_layout(dp=8, zero_stage=1), make_layout(tp=4, pp=2)]
    terms = time_terms(LayoutColumns.of_each(kinds), MODEL, MACHINE)
    factors = PRIOR * np.exp(np.random.default_rng(0).normal(size=(5, len(PRIOR))))
    one_by_one = np.array([terms.step_time_s(each) for each in factors])
    assert terms.drawn_step_times_s(factors).tolist() == one_by_one.tolist()


@given(layouts)
def test_every_term_is_finite_and_none_is_negative(layout: Layout) -> None:
    terms = time_terms(layout, MODEL, MACHINE)
    assert np.all(np.isfinite(terms.seconds))
    assert np.all(terms.seconds >= 0)
    assert terms.step_time_s()[0] > 0


@given(layouts)
def test_the_parts_add_up_to_the_step(layout: Layout) -> None:
    parts = step_time_parts(layout, MODEL, MACHINE)
    assert sum(p.seconds for p in parts) == pytest.approx(step_time_s(layout, MODEL, MACHINE)[0])


@given(layouts, st.sampled_from(TERM_NAMES))
def test_a_larger_factor_never_makes_a_step_faster(layout: Layout, name: str) -> None:
    raised = PRIOR.copy()
    raised[TERM_NAMES.index(name)] *= 1.5
    slower = step_time_s(layout, MODEL, MACHINE, raised)[0]
    assert slower >= step_time_s(layout, MODEL, MACHINE)[0] * (1 - 1e-12)


@given(layouts, st.sampled_from(["micro_batch_size", "num_microbatches"]))
def test_more_sequences_take_longer(layout: Layout, knob: str) -> None:
    more = replace(layout, **{knob: 2 * getattr(layout, knob)})
    assert step_time_s(more, MODEL, MACHINE)[0] > step_time_s(layout, MODEL, MACHINE)[0]


@given(layouts)
def test_shares_are_the_derivatives_of_the_logarithm(layout: Layout) -> None:
    terms = time_terms(layout, MODEL, MACHINE)
    shares, step = terms.shares()[0], 1e-4
    for place in range(len(TERM_NAMES)):
        moved = np.ones(len(TERM_NAMES))
        moved[place] = np.exp(step)
        change = np.log(terms.step_time_s(PRIOR * moved) / terms.step_time_s(PRIOR / moved))[0]
        assert shares[place] == pytest.approx(change / (2 * step), abs=1e-6)


@given(st.lists(layouts, min_size=2, max_size=8))
def test_columns_give_what_each_layout_gives(several: list[Layout]) -> None:
    columns = LayoutColumns.of_each(several)
    one_by_one = [step_time_s(layout, MODEL, MACHINE)[0] for layout in several]
    assert step_time_s(columns, MODEL, MACHINE) == pytest.approx(one_by_one)
    assert time_terms(columns, MODEL, MACHINE).step_time_s() == pytest.approx(one_by_one)


def test_a_grid_of_columns_is_taken_as_all_its_layouts() -> None:
    one = LayoutColumns.of(make_layout())
    grid = replace(one, tp=np.array([[1], [2]]), dp=np.array([[1, 2, 4]]))
    assert len(fields(grid)) == len(LAYOUT_FIELDS)
    expected = [seconds(tp=tp, dp=dp) for tp in (1, 2) for dp in (1, 2, 4)]
    assert step_time_s(grid, MODEL, MACHINE) == pytest.approx(expected)


def test_a_machine_without_a_stated_peak_is_taken_for_one_like_its_memory() -> None:
    unknown = replace(MACHINE, peak_flops_per_s={}, memory_bandwidth_bytes_per_s=2e12)
    assert step_time_s(make_layout(), MODEL, unknown)[0] > 0


def test_every_prior_is_positive_and_uncertain() -> None:
    assert all(prior.median > 0 and prior.log_sd > 0 for prior in FACTOR_PRIORS.values())

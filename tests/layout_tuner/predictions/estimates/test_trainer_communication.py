"""What trainers overlap, send and launch: each cause by itself, on a machine with round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from layout_tuner.predictions.estimates.step_time import (
    TERM_NAMES,
    TimeTerms,
    step_time_parts,
    time_terms,
)
from layout_tuner.predictions.estimates.trainer_kernels import TrainerKernels, kernels_of
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape

MACHINE = Cluster(
    name="round",
    device="a device",
    num_nodes=256,
    devices_per_node=4,
    device_memory_bytes=1 << 36,
    peak_flops_per_s={"bf16": 100e12},
    memory_bandwidth_bytes_per_s=1e12,
    intra_node_bandwidth_bytes_per_s={2: 20e9, 4: 16e9},
    inter_node_bandwidth_bytes_per_s=10e9,
    host_operation_s=10e-6,
    intra_node_latency_s=1e-6,
    inter_node_latency_s=10e-6,
)
MODEL = ModelShape(
    name="small",
    family="llama",
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_heads=16,
    num_kv_heads=16,
    seq_length=1024,
    vocab_size=32000,
    tied_embeddings=False,
)
MIXTURE = replace(
    MODEL, num_experts=8, experts_per_token=2, moe_ffn_hidden_size=512, num_dense_layers=2
)
WEIGHTS = 2.0 * MODEL.num_parameters
ACROSS = 16e9
"""Bandwidth of a group of whole nodes: that inside a node, below that of four cards."""
PUBLISHED = "runs with Megatron-LM"


def terms_of(software: str, cluster: Cluster = MACHINE, **knobs: Any) -> TimeTerms:
    layout = Layout(**{"precision": "bf16", "num_nodes": 256, **knobs})
    return time_terms(layout, MODEL, cluster, kernels=kernels_of(software, cluster))


def term(name: str, software: str, cluster: Cluster = MACHINE, **knobs: Any) -> float:
    return float(terms_of(software, cluster, **knobs).seconds[0, TERM_NAMES.index(name)])


def exposed_s(software: str, **knobs: Any) -> float:
    """Expected seconds that data parallelism adds to a step: reduction, and the gather after it."""
    layout = Layout(**{"precision": "bf16", "num_nodes": 256, **knobs})
    parts = step_time_parts(layout, MODEL, MACHINE, kernels=kernels_of(software, MACHINE))
    return sum(each.seconds for each in parts if each.name.startswith(("data_", "weights", "gath")))


def test_groups_that_lie_across_each_other_divide_the_path_of_a_node_without_a_switch() -> None:
    shared = replace(MACHINE, shared_intra_node_path=True)
    beside = {"tp": 2, "dp": 2, "num_nodes": 1}
    # Two groups of dp, whose ranks are two apart, have 16 GB/s together; alone they would have 20.
    slower = term("data_inside", "", shared, **beside) / term("data_inside", "", **beside)
    assert slower == pytest.approx(20 / 8)
    for knobs in ({"tp": 4, "num_nodes": 1}, {"tp": 2, "dp": 2, "num_nodes": 1}):
        assert term("tensor_inside", "", shared, **knobs) == term("tensor_inside", "", **knobs)
    assert term("data_inside", "", shared, dp=4) == term("data_inside", "", dp=4)
    # Of groups that also leave the node, the slower part counts: two cards, or half of the path.
    across = {"tp": 2, "dp": 8}
    slower = term("data_across", "", shared, **across) / term("data_across", "", **across)
    assert slower == pytest.approx(10 * 2**0.85 / 8)


def test_an_exported_megatron_gathers_and_scatters_beside_one_micro_batch() -> None:
    zero_1 = {"dp": 64, "zero_stage": 1, "micro_batch_size": 4}
    sent = (4.0 * MODEL.num_parameters + WEIGHTS) * 63 / 64 / ACROSS
    for software in ("megatron-lm", "Megatron-LM", "megatron-bridge", "Megatron-Bridge 1.0"):
        assert term("data_across", software, **zero_1) == pytest.approx(sent, rel=0.01)
        assert term("weights_gather", software, **zero_1) == 0
        assert term("gather_latency", software, **zero_1) == 0
        assert term("shards_overlap", software, **zero_1) == 0, "it overlaps for certain"
    # A run of which nobody says so may wait for both.
    assert term("shards_overlap", PUBLISHED, **zero_1) > 0
    gather = term("weights_gather", PUBLISHED, **zero_1)
    assert gather == pytest.approx(1.1 / 3 * WEIGHTS * 63 / 64 / ACROSS, rel=0.01)
    assert exposed_s("megatron-lm", **zero_1) < exposed_s(PUBLISHED, **zero_1)
    # The export has no overlap without ZeRO, so there the odds stay.
    plain = {"dp": 64, "micro_batch_size": 4}
    assert exposed_s("megatron-lm", **plain) == exposed_s(PUBLISHED, **plain) > 0


def test_what_is_longer_than_a_micro_batch_is_waited_for() -> None:
    zero_1 = {"dp": 64, "zero_stage": 1}
    few, many = (exposed_s("megatron-lm", **zero_1, micro_batch_size=n) for n in (1, 64))
    whole = 1.5 * term("data_across", "megatron-lm", **zero_1)
    assert 0.5 * whole < few < 1.1 * whole
    assert many < 0.01 * whole


def test_fsdp_of_megatron_scatters_in_16_bits_and_that_of_torchtitan_in_32() -> None:
    zero_3 = {"dp": 64, "zero_stage": 3, "num_microbatches": 4}
    for software, a_parameter in (("megatron-lm", 2.0), (PUBLISHED, 2.0), ("torchtitan", 4.0)):
        sent = 4 * (a_parameter + 2 * 2.0) * MODEL.num_parameters * 63 / 64 / ACROSS
        assert term("data_across", software, **zero_3) == pytest.approx(sent, rel=0.01)
        assert term("data_overlap", software, **zero_3) == 0
    zero_1 = {"dp": 64, "zero_stage": 1}
    sent = 4.0 * MODEL.num_parameters * 63 / 64 / ACROSS
    assert term("data_across", PUBLISHED, **zero_1) == pytest.approx(sent, rel=0.01)


def test_a_ring_that_sums_gradients_of_known_trainers_takes_the_mean_latency_of_its_hops() -> None:
    # 64 ranks on 16 nodes: 15 of 63 steps leave a node. Without ZeRO there are 2 * 63 for each of 9
    # buckets.
    for software, a_step in (("megatron-lm", 15 * 10e-6 + 48 * 1e-6), ("nanotron", 63 * 10e-6)):
        assert term("data_latency", software, dp=64) == pytest.approx(9 * 2 * a_step)
    assert term("data_latency", "megatron-lm", dp=4) == term("data_latency", "nanotron", dp=4) > 0


def test_groups_of_known_trainers_have_no_congestion_up_to_64_nodes() -> None:
    for software, doublings in (("megatron-lm", 1), ("torchtitan", 1), ("nanotron", 7)):
        at_128 = {"dp": 512, "zero_stage": 3}
        bytes_s = term("data_across", software, **at_128)
        congestion = term("data_congestion", software, **at_128)
        assert congestion == pytest.approx(doublings * bytes_s)
    assert term("data_congestion", "megatron-lm", dp=256) == 0
    assert term("data_congestion", "nanotron", dp=256) > 0


def test_recipes_of_megatron_bridge_hide_sums_over_tp_of_dense_models_under_sequence_parallelism() -> (
    None
):
    knobs = {"tp": 4, "num_nodes": 1, "sequence_parallel": True}
    for name in ("tensor_inside", "latency_inside"):
        whole, exposed = (term(name, each, **knobs) for each in ("megatron-lm", "megatron-bridge"))
        assert exposed == pytest.approx(0.63 * whole)
        plain = {**knobs, "sequence_parallel": False}
        assert term(name, "megatron-bridge", **plain) == term(name, "megatron-lm", **plain) > 0
        place, layout = TERM_NAMES.index(name), Layout(**{"precision": "bf16", **knobs})
        mixtures = [
            time_terms(layout, MIXTURE, MACHINE, kernels=kernels_of(each, MACHINE)).seconds[
                0, place
            ]
            for each in ("megatron-bridge", "megatron-lm")
        ]
        assert mixtures[0] == mixtures[1] > 0


def test_transfers_of_interleaved_stages_are_waited_for_in_warm_up_and_flush_alone() -> None:
    piped = {"pp": 4, "vpp": 2, "num_microbatches": 16, "tp": 4}
    for name in ("pipeline_across", "pipeline_latency"):
        share = (2 * 3 + 1 * 4) / (16 * 2)
        expected = share * term(name, "nanotron", **piped)
        assert term(name, "megatron-lm", **piped) == pytest.approx(expected)
        once = {**piped, "vpp": 1}
        assert term(name, "megatron-lm", **once) == term(name, "nanotron", **once) > 0
        short = {**piped, "num_microbatches": 4}
        assert term(name, "megatron-lm", **short) == term(name, "nanotron", **short)


def test_the_host_launches_the_operations_of_a_layer_with_experts() -> None:
    def host_s(kernels: TrainerKernels, **knobs: Any) -> NDArray[np.float64]:
        layout = Layout(**{"precision": "bf16", "num_nodes": 256, **knobs})
        terms = time_terms(layout, MIXTURE, MACHINE, kernels=kernels)
        return terms.seconds[:, TERM_NAMES.index("host")]

    for software, operations in (("megatron-lm", 700), ("megatron-bridge", 300), ("nanotron", 0)):
        kernels = kernels_of(software, MACHINE)
        for recompute, passes in (("none", 3), ("full", 4)):
            knobs = {"pp": 2, "num_microbatches": 5, "recompute": recompute}
            more = host_s(kernels, **knobs) - host_s(TrainerKernels(), **knobs)
            # Six of eight layers have experts, over two stages; six slots of micro-batches.
            assert more == pytest.approx(6 / 2 * 6 * operations * passes / 3 * 10e-6)
    dense = [term("host", each, pp=2) for each in ("megatron-lm", "nanotron")]
    assert dense[0] == dense[1]

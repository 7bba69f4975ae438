"""A simulated step: what must hold of it whatever its constants are, and every knob."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from search_spaces.spec.layout import KNOBS, Layout
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS
from search_spaces.spec.presets.models import model_preset
from workers.simulation.machine import Machine
from workers.simulation.memory import RankMemory, rank_memory
from workers.simulation.placement import Place
from workers.simulation.steps import PARTS, SimulatedStep, stage_layers, steps

MODEL = model_preset("gpt-1.3b")
MIXTURE = model_preset("mixtral-8x7b")
CLUSTER = CLUSTER_PRESETS["a100-sxm"]
MACHINE = Machine.of(CLUSTER)


def make_layout(**knobs: Any) -> Layout:
    return Layout(**({"precision": "bf16", "num_microbatches": 8} | knobs))


def step(
    layout: Layout, model: ModelShape = MODEL, machine: Machine = MACHINE, **more: Any
) -> SimulatedStep:
    return steps([layout], model, machine, **more)[0]


def peak(layout: Layout, model: ModelShape = MODEL, machine: Machine = MACHINE) -> RankMemory:
    ranks = rank_memory(layout, model, machine, seed=0)
    return max(ranks, key=lambda rank: rank.reserved_bytes)


@pytest.mark.parametrize(
    ("model", "knobs"),
    [
        *((MODEL, {"num_nodes": 2, "dp": 16, "zero_stage": stage}) for stage in (0, 1, 2, 3)),
        (MODEL, {"num_nodes": 2, "dp": 16, "zero_stage": 3, "zero_replicas": 2}),
        *((MODEL, {"cp": 4, "tp": 2, "cp_comm_type": c}) for c in ("all_gather", "p2p", "a2a")),
        (MODEL, {"tp": 2, "tp_columns": 4}),
        (MODEL, {"tp": 2, "tp_columns": 2, "pp": 2, "schedule": "zero_bubble"}),
        *((MODEL, {"pp": 4, "dp": 2, "schedule": s}) for s in ("1f1b", "gpipe", "zero_bubble")),
        (MODEL, {"pp": 4, "dp": 2, "vpp": 3}),
        (MODEL, {"num_nodes": 2, "pp": 4, "dp": 4, "rank_order": "tp_cp_pp_dp"}),
        (replace(MODEL, num_layers=23), {"pp": 4, "dp": 2, "pipeline_split": "head"}),
        *((MODEL, {"tp": 4, "recompute": r}) for r in ("none", "selective", "full")),
        (MODEL, {"tp": 4, "sequence_parallel": True}),
        *((MODEL, {"dp": 8, "precision": p}) for p in ("fp32", "bf16", "fp16", "fp8")),
        (MIXTURE, {"num_nodes": 2, "dp": 16, "ep": 8, "zero_stage": 1}),
        (MIXTURE, {"tp": 2, "sequence_parallel": True, "dp": 4, "ep": 2, "etp": 2}),
    ],
)
def test_the_parts_of_a_step_add_up_with_any_knob(model: ModelShape, knobs: dict[str, Any]) -> None:
    layout = make_layout(**knobs)
    found = step(layout, model)
    assert tuple(found.parts_s) == PARTS
    assert sum(found.parts_s.values()) == pytest.approx(found.step_s)
    assert all(part >= 0 for name, part in found.parts_s.items() if name != "unexplained_s")
    axes = {"tp": layout.tp * layout.tp_columns, "cp": layout.cp, "ep": layout.ep, "pp": layout.pp}
    for axis, degree in axes.items():
        assert (found.parts_s[f"{axis}_s"] > 0) == (degree > 1), axis
    assert peak(layout, model).reserved_bytes >= peak(layout, model).allocated_bytes > 0
    assert knobs.keys() <= KNOBS.keys()


def test_without_a_pipeline_a_step_is_the_sum_of_its_microbatches() -> None:
    one, four = (step(make_layout(num_microbatches=m)) for m in (1, 4))
    assert one.parts_s["pp_s"] == pytest.approx(0)
    assert four.parts_s["compute_s"] == pytest.approx(4 * one.parts_s["compute_s"])
    rest = one.step_s - one.parts_s["compute_s"]
    assert four.step_s == pytest.approx(4 * one.parts_s["compute_s"] + rest)


def test_layouts_simulated_together_come_out_as_if_alone() -> None:
    layouts = [make_layout(pp=4, dp=dp, tp=tp) for dp, tp in ((1, 1), (2, 1), (1, 2), (4, 2))]
    together = [found.step_s for found in steps(layouts, MODEL, MACHINE)]
    assert together == [step(layout).step_s for layout in layouts]


def test_groups_that_share_network_cards_take_longer() -> None:
    slow = replace(CLUSTER, inter_node_bandwidth_bytes_per_s=2e9)
    machine = Machine.of(slow)
    # One replica a node: the stages of a replica are neighbours, and every sum crosses nodes.
    apart = make_layout(num_nodes=4, pp=8, dp=4, rank_order="tp_cp_pp_dp")
    near = replace(apart, rank_order="tp_cp_dp_pp")
    assert (
        step(apart, machine=machine).parts_s["dp_s"] > step(near, machine=machine).parts_s["dp_s"]
    )
    # Eight groups of a rank a node share the cards that one group of eight has to itself.
    size = 1e9
    alone = Place(size=4, num_nodes=4, here=1, crossing=1)
    crowded = replace(alone, crossing=8)
    collectives = Machine.of(CLUSTER_PRESETS["frontier"]).collectives
    assert collectives.reduce_s(crowded, size) > 1.9 * collectives.reduce_s(alone, size)


def test_one_slow_node_holds_up_the_whole_job() -> None:
    layout = make_layout(num_nodes=4, tp=2, pp=2, dp=8)
    even, slow = (step(layout, node_slowness=each) for each in ([1.0] * 4, [1.0, 1.0, 1.3, 1.0]))
    assert 1.1 < slow.step_s / even.step_s <= 1.3


def test_slower_parts_of_a_machine_slow_down_what_they_do() -> None:
    layout = make_layout(num_nodes=2, tp=4, dp=4)
    before, device = step(layout), MACHINE.device
    slow = replace(MACHINE, device=replace(device, matmul_share=device.matmul_share / 2))
    assert step(layout, machine=slow).parts_s["compute_s"] > 1.5 * before.parts_s["compute_s"]
    thin = replace(MACHINE, collectives=replace(MACHINE.collectives, near_speed=0.5))
    assert step(layout, machine=thin).parts_s["tp_s"] > 1.3 * before.parts_s["tp_s"]
    host = replace(MACHINE, host_s=1e-3)
    assert step(layout, machine=host).step_s > before.step_s


def test_recomputation_costs_about_a_forward_pass_and_frees_most_of_the_activations() -> None:
    kept = make_layout(dp=8, micro_batch_size=8, num_microbatches=4)
    again = replace(kept, recompute="full")
    assert 1.2 < step(again).step_s / step(kept).step_s < 1.45
    assert peak(again).allocated_bytes < 0.75 * peak(kept).allocated_bytes


def test_memory_grows_with_what_is_in_flight_and_shrinks_with_zero() -> None:
    # Few words: the logits of the last stage shall not be the peak.
    model = replace(MODEL, vocab_size=128)

    def allocated(**knobs: Any) -> float:
        return peak(make_layout(micro_batch_size=4, **knobs), model).allocated_bytes

    one, full = (allocated(pp=4, num_microbatches=m) for m in (1, 4))
    assert allocated(pp=4, num_microbatches=2) - one == pytest.approx((full - one) / 3, rel=0.01)
    assert allocated(pp=4, num_microbatches=64) == full
    assert allocated(pp=4, num_microbatches=16, schedule="gpipe") > 3 * full - 3 * one
    by_stage = [allocated(dp=8, zero_stage=stage) for stage in (0, 1, 2, 3)]
    assert by_stage == sorted(by_stage, reverse=True)
    assert by_stage[1] < by_stage[0] - 8 * model.num_parameters
    assert allocated(dp=8, zero_stage=3, zero_replicas=4) > by_stage[3]


def test_products_of_an_unlucky_shape_leave_units_idle() -> None:
    device = replace(MACHINE.device, num_units=108)

    def flops_per_s(tiles: int) -> float:
        rows, columns, inner = 256 * tiles, 128 * 9, 8192
        return 2.0 * rows * columns * inner / device.matmul_s(rows, columns, inner, "bf16")

    # 12 times 9 tiles fill one wave; 13 times 9 take a second one, or smaller tiles.
    assert flops_per_s(13) < 0.95 * flops_per_s(12)
    assert flops_per_s(24) == pytest.approx(flops_per_s(12), rel=0.05)


def test_stages_have_every_layer_once_however_they_are_split() -> None:
    for layout in (make_layout(pp=4), make_layout(pp=5), make_layout(pp=2, vpp=3)):
        for by_work in (False, True):
            layers = stage_layers(layout, MODEL, by_work=by_work)
            assert [i for stage in layers for i in stage] == list(range(MODEL.num_layers))
            assert len(layers) == layout.pp * layout.vpp
    split = stage_layers(
        make_layout(pp=4, pipeline_split="head"), replace(MODEL, num_layers=23), by_work=False
    )
    assert [len(stage) for stage in split] == [6, 6, 6, 5]

"""A simulated step: what must hold of it with any constants and knobs; the walk through it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import PRECISIONS, Layout
from layout_tuner.search_spaces.layouts.schedules import (
    Backward,
    Forward,
    WeightGradients,
    pipeline_schedule,
)
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.simulation.machine import Machine
from layout_tuner.workers.simulation.placement import Place
from layout_tuner.workers.simulation.simulated_peaks import RankMemory, rank_memory
from layout_tuner.workers.simulation.steps import PARTS, SimulatedStep, stage_layers, steps
from layout_tuner.workers.simulation.walk import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Schedule,
    Timeline,
    TracedSpan,
    held_passes,
    walk,
)

MODEL = model_preset("gpt-1.3b")
MIXTURE = model_preset("mixtral-8x7b")
CLUSTER = CLUSTER_PRESETS["a100-sxm"]
MACHINE = Machine.of(CLUSTER)


@pytest.mark.parametrize(
    ("cluster", "units"), [("frontier", 110), ("a100-sxm", 108), ("h100-sxm", 132)]
)
def test_a_device_has_the_units_of_its_family(cluster: str, units: int) -> None:
    assert Machine.of(CLUSTER_PRESETS[cluster]).device.num_units == units


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
        *((MODEL, {"dp": 8, "precision": p}) for p in PRECISIONS),
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


def test_attention_is_fused_as_the_model_says_and_else_as_the_trainer_does() -> None:
    layout = make_layout(dp=8, micro_batch_size=4)
    unfusing = replace(MACHINE, software=replace(MACHINE.software, fused_attention=False))
    for name in ("fused", "unfused"):
        model = replace(MODEL, attention=name)
        trainer = MACHINE if name == "fused" else unfusing
        for machine in (MACHINE, unfusing):
            assert peak(layout, model, machine) == peak(layout, machine=trainer)
            assert step(layout, model, machine) == step(layout, machine=trainer)


def test_dropout_keeps_a_byte_of_mask_for_each_score_and_each_feature() -> None:
    layout, model = make_layout(tp=2, micro_batch_size=4), replace(MODEL, vocab_size=128)

    def more(**fields: Any) -> float:
        before = replace(model, attention=fields.get("attention"))
        grown = peak(layout, replace(model, **fields)), peak(layout, before)
        return (grown[0].allocated_bytes - grown[1].allocated_bytes) / model.num_layers

    tokens = 4 * model.seq_length
    assert more(hidden_dropout=0.1) == pytest.approx(2 * tokens * model.hidden_size)
    scores = tokens * model.seq_length * model.num_heads / 2
    assert more(attention="unfused", attention_dropout=0.1) == pytest.approx(scores)
    assert more(attention="fused", attention_dropout=0.1) == 0


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


def test_tensor_parallel_ranks_share_the_activations_of_a_layer_in_equal_parts() -> None:
    model = replace(MODEL, vocab_size=128)

    def kept(tp: int) -> float:
        """Bytes of one more micro-batch in flight: what is shared, and what every rank has."""
        one, two = (
            peak(make_layout(tp=tp, pp=2, num_microbatches=m), model).allocated_bytes
            for m in (1, 2)
        )
        return two - one

    assert kept(1) - kept(2) == pytest.approx(2 * (kept(2) - kept(4)))


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


SCHEDULES = [
    Schedule(pp=1, vpp=1, num_microbatches=3),
    Schedule(pp=2, vpp=1, num_microbatches=1),
    Schedule(pp=4, vpp=1, num_microbatches=13),
    Schedule(pp=3, vpp=1, num_microbatches=5, name="gpipe"),
    Schedule(pp=4, vpp=1, num_microbatches=9, name="zero_bubble"),
    Schedule(pp=4, vpp=2, num_microbatches=8),
    Schedule(pp=3, vpp=4, num_microbatches=9),
    # Long ones, whose tables repeat a block.
    Schedule(pp=3, vpp=1, num_microbatches=40),
    Schedule(pp=1, vpp=1, num_microbatches=11),
    Schedule(pp=3, vpp=1, num_microbatches=40, name="zero_bubble"),
    Schedule(pp=3, vpp=2, num_microbatches=45),
    Schedule(pp=2, vpp=3, num_microbatches=60),
]


def walk_equal(
    schedule: Schedule,
    seconds: tuple[float, float, float] = (1.0, 2.0, 0.0),
    *,
    hop_s: float = 0.0,
    spans: list[TracedSpan] | None = None,
) -> Timeline:
    """Equal stages, whose passes together take these seconds a rank and micro-batch."""
    each = [[part / schedule.vpp] * schedule.num_stages for part in seconds]
    return walk(schedule, each, [hop_s] * schedule.pp, spans=spans)


def test_two_stages_and_two_microbatches_end_as_counted_by_hand() -> None:
    # Rank 0: F0 at 0, F1 at 1, waits from 2; rank 1: F0 at 1, B0 at 2..4, F1 at 4, B1 at 5..7.
    # Rank 0 goes on with B0 at 4..6 and B1 at 7..9.
    timeline = walk_equal(Schedule(pp=2, vpp=1, num_microbatches=2))
    assert timeline.rank_end_s == [9.0, 7.0]
    assert timeline.last_start_s == [7.0, 5.0]
    # Each message takes 0.5 s. Rank 1: F0 at 1.5..2.5, B0 to 4.5, whose transfer ends at 5, F1 to
    # 6, B1 to 8, sent by 8.5. Rank 0: B0 at 5..7, B1 at 8.5..10.5.
    timeline = walk_equal(Schedule(pp=2, vpp=1, num_microbatches=2), hop_s=0.5)
    assert timeline.rank_end_s == [10.5, 8.5]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_equal_stages_idle_for_the_bubble_of_the_schedule(schedule: Schedule) -> None:
    """1F1B: (p - 1)(F + B)/v (arXiv:2104.04473); ZB-H1: (p - 1)(F + B - W) (arXiv:2401.10241)."""
    is_zero_bubble = schedule.name == "zero_bubble"
    seconds = (1.0, 1.0, 1.0) if is_zero_bubble else (1.0, 2.0, 0.0)
    timeline = walk_equal(schedule, seconds)
    bubble_s = max(timeline.rank_end_s) - 3.0 * schedule.num_microbatches
    wanted = (schedule.pp - 1) * (1.0 if is_zero_bubble else 3.0 / schedule.vpp)
    assert bubble_s == pytest.approx(wanted)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_runs_the_trainers_actions_in_order_and_none_before_its_message_has_come(
    schedule: Schedule,
) -> None:
    spans: list[TracedSpan] = []
    walk_equal(schedule, (1.0, 1.5, 0.5), hop_s=0.3, spans=spans)
    of_rank: dict[int, list[TracedSpan]] = defaultdict(list)
    for span in spans:
        if span.kind in (FORWARD, BACKWARD, WEIGHTS):
            of_rank[span.rank].append(span)
    kinds = {Forward: FORWARD, Backward: BACKWARD, WeightGradients: WEIGHTS}
    for rank in range(schedule.pp):
        actions = pipeline_schedule(
            rank,
            pp=schedule.pp,
            vpp=schedule.vpp,
            num_microbatches=schedule.num_microbatches,
            schedule=schedule.name,
        )
        wanted = [
            (kinds[type(each)], each.of.chunk * schedule.pp + rank, each.of.microbatch)
            for each in actions
            if isinstance(each, Forward | Backward | WeightGradients)
        ]
        assert [(s.kind, s.stage, s.microbatch) for s in of_rank[rank]] == wanted
        assert all(a.end_s <= b.start_s for a, b in pairwise(of_rank[rank]))
    found = {(s.kind, s.stage, s.microbatch): s for s in spans if s.kind != WEIGHTS}
    last = schedule.num_stages - 1
    for (kind, stage, microbatch), span in found.items():
        before = stage - 1 if kind == FORWARD else stage + 1
        if kind in (FORWARD, BACKWARD) and 0 <= before <= last:
            assert span.start_s >= found[kind, before, microbatch].end_s + 0.3 - 1e-9


def test_the_slowest_stage_sets_the_pace() -> None:
    schedule = Schedule(pp=3, vpp=1, num_microbatches=20)
    timeline = walk(schedule, [[1.0, 1.5, 1.0], [2.0, 3.0, 2.0], [0.0] * 3], [0.0] * 3)
    # The slow rank begins at 1, has F0 and F1 done at 4 and waits for B0 until 5.5, is then busy to
    # the end with what is left of 20 times 4.5, and one backward pass follows on rank 0.
    assert max(timeline.rank_end_s) == pytest.approx(5.5 + (20 * 4.5 - 3) + 2)


@pytest.mark.parametrize("microbatches", [1, 3, 16, 1000])
def test_plain_1f1b_holds_as_many_microbatches_as_stages_follow(microbatches: int) -> None:
    schedule = Schedule(pp=4, vpp=1, num_microbatches=microbatches)
    assert held_passes(schedule) == tuple(((min(microbatches, 4 - r), 0),) for r in range(4))


def test_other_schedules_hold_what_their_papers_say() -> None:
    # arXiv:2205.05198, section 4.2.3: 1 + (p - 1) / (p v) times the whole pipeline's, on rank 0.
    interleaved = held_passes(Schedule(pp=4, vpp=2, num_microbatches=32))
    assert interleaved[0][0][0] / 2 == pytest.approx(4 * (1 + 3 / (4 * 2)))
    gpipe = held_passes(Schedule(pp=4, vpp=1, num_microbatches=9, name="gpipe"))
    assert gpipe == (((9, 0),),) * 4
    late = held_passes(Schedule(pp=4, vpp=1, num_microbatches=16, name="zero_bubble"))
    assert [max(sum(pair) for pair in pairs) for pairs in late] == [5, 5, 5, 5]

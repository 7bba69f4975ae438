"""The devices and the schedule of a layout, as they are drawn."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.api import html
from layout_tuner.api.plots.layout_map import layout_map
from layout_tuner.api.plots.schedule_plot import (
    MAX_STAGES,
    bubble,
    end_units,
    enough_microbatches,
    schedule_plot,
)
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.rank_mesh import coordinates
from layout_tuner.search_spaces.layouts.recomputation import Recompute
from layout_tuner.search_spaces.layouts.schedules import Schedule, pipeline_schedule
from layout_tuner.search_spaces.layouts.timed_schedule import timed_schedule
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape


def found(pattern: str, layout: Layout) -> list[str]:
    return re.findall(pattern, str(layout_map(layout).svg))


def frames(layout: Layout) -> list[int]:
    """Tensor-parallel groups on each node."""
    return [each.count("M") for each in found(r'<path d="([^"]*)" class="tp"', layout)]


STAGES = r">(S\d+) R\d+</text>"
NODES = r">(node [^<]*)</text>"
EXPERTS = r"E[\d.]+(?=<)"


def test_every_device_has_its_stage_and_replica_in_the_order_of_the_ranks() -> None:
    layout = Layout(num_nodes=3, tp=2, pp=3, dp=4, num_microbatches=4)
    places = [coordinates(rank, layout) for rank in range(24)]
    cells = [f"S{place.pp_rank} R{place.dp_rank}" for place in places]
    assert found(r">(S\d+ R\d+)</text>", layout) == cells
    ranks = ["ranks 0 to 7", "ranks 8 to 15", "ranks 16 to 23"]
    assert found(NODES, layout) == [f"node {node}: {words}" for node, words in enumerate(ranks)]
    assert frames(layout) == [4, 4, 4]
    assert len(layout_map(layout).notes) == 1
    assert frames(Layout(tp=16)) == [2]
    columns = Layout(tp=2, tp_columns=2, dp=2)
    assert frames(columns) == [2]
    drawn = layout_map(columns)
    assert "A frame holds a tensor-parallel group of 4." in drawn.notes[0]
    assert "tensor-parallel groups of 4 in 2 columns" in str(drawn.svg)


def test_stages_with_a_layer_fewer_are_named() -> None:
    assert len(layout_map(Layout(pp=4)).notes) == 1
    for split, says in (
        ("embedding", ["S0 has one layer fewer: its embedding counts as a layer."]),
        ("head", ["S3 has one layer fewer: its head counts as a layer."]),
        ("embedding_and_head", ["S0 has one layer", "S3 has one layer"]),
    ):
        _, *notes = layout_map(Layout(pp=4, pipeline_split=split)).notes
        assert all(note.startswith(each) for note, each in zip(notes, says, strict=True))
        assert len(layout_map(Layout(pipeline_split=split)).notes) == 1


@pytest.mark.parametrize(
    ("layout", "num_nodes", "says"),
    [
        (Layout(num_nodes=512, tp=8, pp=16, dp=32), 16, "16 of 512 nodes: the first of each"),
        (Layout(num_nodes=512, tp=8, pp=64, dp=8), 16, "the first and the last 8 pipeline stages"),
        (Layout(num_nodes=512, tp=8, dp=512), 1, "Drawn are 1 of 512 nodes"),
        (Layout(dp=4096), 1, "Drawn are the first 32 of the 4,096 devices of a node."),
    ],
    ids=str,
)
def test_a_large_job_is_folded_and_says_so(layout: Layout, num_nodes: int, says: str) -> None:
    drawn = layout_map(layout)
    assert len(found(NODES, layout)) == num_nodes
    assert says in " ".join(drawn.notes)
    assert len(drawn.svg) < 60_000
    if layout.pp == 16:  # as many stages as nodes are drawn
        assert set(found(STAGES, layout)) == {f"S{stage}" for stage in range(16)}


def test_cells_name_the_rank_of_a_context_parallel_group() -> None:
    layout = Layout(num_nodes=2, cp=4, dp=2, pp=2)
    places = [coordinates(rank, layout) for rank in range(16)]
    cells = [f"S{place.pp_rank} R{place.dp_rank} C{place.cp_rank}" for place in places]
    assert found(r"S\d+ R\d+ C\d+", layout) == cells
    drawn = layout_map(layout)
    assert "context-parallel groups of 4" in str(drawn.svg)
    assert any("the 4 ranks with the same S, R" in note for note in drawn.notes)
    assert found(" C0", Layout(dp=8)) == []


def test_cells_name_the_experts_that_a_device_holds() -> None:
    both = Layout(tp=2, dp=4, ep=2, etp=2)
    assert found(EXPERTS, both) == 2 * ["E0.0", "E0.1", "E1.0", "E1.1"]
    drawn = layout_map(both)
    assert "expert-parallel groups of 2, expert-tensor-parallel groups of 2" in str(drawn.svg)
    (note,) = (note for note in drawn.notes if note.startswith("E "))
    assert "the 2 shares of each layer's experts" in note
    assert note.endswith("After the dot: the 2 parts of their weights.")
    assert found(EXPERTS, Layout(dp=4, ep=4)) == ["E0", "E1", "E2", "E3"]
    parts = Layout(tp=2, dp=2, etp=2)
    assert found(EXPERTS, parts) == 2 * ["E0", "E1"]
    assert "the same part of all experts" in layout_map(parts).notes[-1]
    assert found(" E0", Layout(dp=4)) == []


CASES = [(1, 1, 1), (2, 1, 1), (4, 1, 3), (4, 1, 16), (2, 2, 4), (4, 2, 8), (4, 4, 8), (8, 3, 24)]
ZERO_BUBBLE = Layout(pp=2, num_microbatches=4, schedule="zero_bubble")
SCHEDULED: list[tuple[int, int, int, Schedule]] = [
    *((*case, "1f1b") for case in CASES),
    *((*case, schedule) for case in CASES[:4] for schedule in ("gpipe", "zero_bubble")),
]


@pytest.mark.parametrize(
    ("pp", "vpp", "num_microbatches", "schedule", "recompute"),
    [(*case, ("none", "full")[number // 2 % 2]) for number, case in enumerate(SCHEDULED)],
)
def test_passes_wait_for_their_input_in_the_trainers_order_and_idle_as_the_formula_says(
    pp: int, vpp: int, num_microbatches: int, schedule: Schedule, recompute: Recompute
) -> None:
    sizes: dict[str, Any] = {"pp": pp, "vpp": vpp, "num_microbatches": num_microbatches}
    sizes["schedule"] = schedule
    backward = 3.0 if recompute == "full" else 2.0
    timed = timed_schedule(**sizes, backward_units=backward)
    busy = sum(each.end - each.start for passes in timed.ranks for each in passes)
    share = 1.0 - busy / (pp * timed.length)
    assert bubble(Layout(**sizes, recompute=recompute)) == pytest.approx(share, abs=1e-12)
    if schedule != "zero_bubble":
        assert share == pytest.approx((pp - 1) / (vpp * num_microbatches + pp - 1), abs=1e-12)

    starts, ends = {}, {}
    for rank, passes in enumerate(timed.ranks):
        actions = pipeline_schedule(rank, **sizes)
        order = [action.of for action in actions if hasattr(action, "of")]
        assert [(each.chunk, each.microbatch) for each in passes] == [tuple(of) for of in order]
        assert all(after.start >= before.end for before, after in itertools.pairwise(passes))
        for each in passes:
            key = (each.kind, each.chunk * pp + rank, each.microbatch)
            starts[key], ends[key] = each.start, each.end
    steps = {"forward": -1, "backward": 1, "weights": 0}
    for (kind, stage, microbatch), start in starts.items():
        if kind != "weights":
            assert start >= ends.get((kind, stage + steps[kind], microbatch), 0.0)
        if kind != "forward":
            earlier = "forward" if kind == "backward" else "backward"
            assert start >= ends[earlier, stage, microbatch]


@pytest.mark.parametrize(
    ("pp", "vpp", "backward"),
    [(1, 1, 2.0), (4, 1, 3.0), (16, 1, 2.0), (24, 1, 3.0), (3, 2, 2.0), (8, 4, 3.0), (3, 2, 3.0)],
)
def test_the_drawn_ends_are_those_of_a_longer_schedule(pp: int, vpp: int, backward: float) -> None:
    """What allows the middle to be left out without computing it."""
    few = enough_microbatches(pp, vpp, backward)
    more = 3 * pp
    short, long = (
        timed_schedule(pp=pp, vpp=vpp, num_microbatches=number, backward_units=backward)
        for number in (few, few + more)
    )
    later, end = long.length - short.length, end_units(pp)
    assert later == pytest.approx(more * vpp * (1 + backward))
    for drawn, whole in zip(short.ranks, long.ranks, strict=True):
        assert [p for p in drawn if p.start < end] == [p for p in whole if p.start < end]
        assert [
            (p.chunk, p.kind, p.microbatch + more, p.start + later)
            for p in drawn
            if p.end > short.length - end
        ] == [(p.chunk, p.kind, p.microbatch, p.start) for p in whole if p.end > long.length - end]


@pytest.mark.parametrize(
    ("layout", "is_broken"),
    [
        (Layout(pp=4, num_microbatches=8), False),
        (Layout(pp=16, num_microbatches=64), False),
        (Layout(pp=16, num_microbatches=640), True),
        (Layout(pp=16, vpp=4, num_microbatches=640), True),
        (Layout(pp=128, num_microbatches=1_000_000), True),
    ],
    ids=str,
)
def test_a_drawing_is_small_and_says_what_it_leaves_out(layout: Layout, is_broken: bool) -> None:
    drawn = schedule_plot(layout)
    assert len(drawn.svg) < 100_000
    assert any("left out" in note for note in drawn.notes) == is_broken
    last = f">{layout.num_microbatches - 1}<"
    assert (last in drawn.svg) or layout.pp >= 16  # narrow boxes have no number
    numbers = [float(word) for word in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn.svg)[0]]
    assert numbers[0] < 1300
    assert numbers[1] < 600


def test_the_numbers_and_times_of_a_drawing_are_the_layouts() -> None:
    drawn = schedule_plot(Layout(pp=2, num_microbatches=640))
    texts = re.findall(r">(\d+)</text>", drawn.svg)
    assert {"0", "1", "638", "639"} <= set(texts)
    assert "320" not in texts
    drawn = schedule_plot(Layout(pp=2, num_microbatches=2), compute_s=0.2)
    # (m + pp - 1) / m times the compute time of a rank.
    assert ">0.3 s<" in drawn.svg
    assert any("0.2 s a step" in note for note in drawn.notes)
    assert any("33.3%" in note for note in drawn.notes)
    again = schedule_plot(Layout(pp=2, num_microbatches=2, recompute="full"))
    assert any("thrice" in note for note in again.notes)
    assert schedule_plot(Layout(pp=MAX_STAGES, vpp=2, num_microbatches=256)) is None


@pytest.mark.parametrize("layout", [Layout(pp=2, vpp=2, num_microbatches=4), ZERO_BUBBLE])
def test_every_kind_of_pass_has_a_colour(layout: Layout) -> None:
    plot = schedule_plot(layout)
    drawn = set(re.findall(r'class="(?:on-)?([a-z]+[01])"', str(plot.svg)))
    style = (Path(html.__file__).parent / "static/dashboard.css").read_text()
    coloured = set(re.findall(r"svg \.schedule \.([a-z]+[01])[ ,]", style))
    assert {"forward0", "backward0"} < drawn <= coloured


def test_a_drawing_names_domains_and_the_level_of_each_traffic() -> None:
    trays = CLUSTER_PRESETS["gb200"]
    layout = Layout(num_nodes=32, tp=4, pp=2, dp=16, ep=64, num_microbatches=2)
    drawn = layout_map(layout, trays)
    heads = re.findall(NODES, str(drawn.svg))
    assert heads[0] == "node 0, domain 0: ranks 0 to 3"
    assert heads[16] == "node 16, domain 1: ranks 64 to 67"
    said = "Largest level of the network that each kind of group needs: tray: tp; domain: ep, dp; fabric: pp."
    assert drawn.notes[-1] == said
    assert layout_map(layout, CLUSTER_PRESETS["h200"]) == layout_map(layout)


def test_a_job_in_one_domain_needs_no_number_of_it() -> None:
    drawn = layout_map(Layout(num_nodes=16, dp=64), CLUSTER_PRESETS["gb200"])
    assert re.findall(NODES, str(drawn.svg))[15] == "node 15: ranks 60 to 63"
    alone = layout_map(Layout(), CLUSTER_PRESETS["gb200"])
    assert alone.notes[-1].endswith("needs: none.")


def test_unequal_stages_and_v_schedules_are_drawn() -> None:
    uneven = Layout(pp=4, num_microbatches=8, pipeline_layout="Et*5|t*9|t*9|t*9L")
    equal = replace(uneven, pipeline_layout="split")
    plot = schedule_plot(uneven)
    assert plot is not None
    assert bubble(uneven) > bubble(equal)
    assert any("as long as its stage has layers" in note for note in plot.notes)
    # In many micro-batches, the first stage waits for the others: 5 of 9 layers, all in the mean.
    many = bubble(replace(uneven, num_microbatches=8000))
    assert many == pytest.approx(1 - 8 / 9, abs=0.01)
    for name in ("zbv", "v_half", "v_min"):
        v = schedule_plot(replace(equal, schedule=name, vpp=2))
        assert v is not None
        assert f"{name} schedule of 4 stages" in str(v.svg)
        assert "weight gradients" in str(v.svg)
    assert bubble(replace(equal, schedule="zbv", vpp=2)) < bubble(equal)


@pytest.mark.parametrize(
    ("layers", "idle"),
    [
        ("all", 3 / 11),
        ("8", 3 / 11),
        ("4", 3 / 11),
        # Passes of the first rank take 4 units, of the others 3.
        ("8/0/0/0", 1 - 8 * 13 / 4 / (4 + 3 * 2 + 4 + 8 * 3)),
    ],
)
def test_layers_that_recompute_make_passes_longer(layers: str, idle: float) -> None:
    layout = Layout(pp=4, num_microbatches=8, recompute="full", recompute_layers=layers)
    assert bubble(layout, 32) == pytest.approx(idle, abs=1e-12)
    uneven = isinstance(layers, str) and "/" in layers
    plot = schedule_plot(layout, num_layers=32)
    assert plot is not None
    assert any("more layers recompute in some stages" in note for note in plot.notes) == uneven
    assert any("thrice" in note for note in plot.notes) == (layers in ("all", "8"))


def test_an_axis_counts_the_layers_that_recompute() -> None:
    half = Layout(pp=2, num_microbatches=4, recompute="full", recompute_layers="4")
    for layout, num_layers, passes in (
        (half, 16, 17.5),  # 5 * (1 + 2.5)
        (half, None, 20),
        (replace(half, recompute_layers="all"), 16, 20),
        (replace(half, recompute="mlp"), 16, 15),
    ):
        plot = schedule_plot(layout, num_layers=num_layers)
        assert plot is not None
        assert f">{passes:,.0f} passes<" in plot.svg
        assert any("by the recomputation of mlp" in n for n in plot.notes) == (passes == 15)


def test_a_drawing_names_the_kinds_of_layers_by_stage() -> None:
    model = ModelShape.from_mapping(
        {
            **model_preset("tiny-moe").to_mapping(),
            "num_layers": 8,
            "ffn_hidden_size": 256,
            "layer_kinds": [{"full+dense": 2}, {"full+experts": 6}],
            "num_mtp_layers": 1,
        }
    )
    drawn = schedule_plot(Layout(pp=4, num_microbatches=8), model=model)
    assert drawn is not None
    assert drawn.notes[-1] == (
        "Layers by stage: 0: 2 full+dense; 1 to 2: 2 full+experts; 3: 2 full+experts, 1 depth of "
        "multi-token prediction."
    )
    chunks = schedule_plot(Layout(pp=2, vpp=2, num_microbatches=4), model=model)
    assert chunks is not None
    assert "0: 2 full+dense, 2 full+experts; 1: 4 full+experts, 1 depth" in chunks.notes[-1]
    alike = schedule_plot(Layout(pp=2, num_microbatches=4), model=model_preset("tiny-moe"))
    assert alike is not None
    assert "Layers by stage" not in alike.notes[-1]

from __future__ import annotations

import re

import pytest

from api.plots.layout_map import layout_map
from search_spaces.mesh import coordinates
from search_spaces.spec.layout import Layout


def cells(svg: str) -> list[str]:
    return re.findall(r">(S\d+ R\d+)</text>", svg)


def nodes(svg: str) -> list[str]:
    return re.findall(r">(node [^<]*)</text>", svg)


def test_every_device_has_its_stage_and_replica_in_the_order_of_the_ranks() -> None:
    layout = Layout(num_nodes=3, tp=2, pp=3, dp=4, num_microbatches=4)
    drawn = layout_map(layout)
    places = [coordinates(rank, layout) for rank in range(24)]
    assert cells(drawn.svg) == [f"S{place.pp_rank} R{place.dp_rank}" for place in places]
    assert nodes(drawn.svg) == [
        "node 0: ranks 0 to 7",
        "node 1: ranks 8 to 15",
        "node 2: ranks 16 to 23",
    ]
    frames = re.findall(r'<path d="([^"]*)" class="tp"', drawn.svg)
    assert [each.count("M") for each in frames] == [4, 4, 4]  # tensor-parallel groups
    assert len(drawn.notes) == 1
    drawn = layout_map(Layout(tp=16))
    (frames,) = re.findall(r'<path d="([^"]*)" class="tp"', drawn.svg)
    assert frames.count("M") == 2


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
    assert len(nodes(drawn.svg)) == num_nodes
    assert says in " ".join(drawn.notes)
    assert len(drawn.svg) < 60_000
    if layout.pp == 16:  # as many stages as nodes are drawn
        stages = {cell.split()[0] for cell in cells(drawn.svg)}
        assert stages == {f"S{stage}" for stage in range(16)}


def test_a_frame_holds_the_rows_and_columns_of_a_tensor_parallel_group() -> None:
    drawn = layout_map(Layout(tp=2, tp_columns=2, dp=2))
    assert "A frame holds a tensor-parallel group of 4." in drawn.notes[0]
    assert "tensor-parallel groups of 4 in 2 columns" in str(drawn.svg)
    (frames,) = re.findall(r'<path d="([^"]*)" class="tp"', str(drawn.svg))
    assert frames.count("M") == 2


def test_cells_name_the_rank_of_a_context_parallel_group() -> None:
    layout = Layout(num_nodes=2, cp=4, dp=2, pp=2)
    drawn = layout_map(layout)
    places = [coordinates(rank, layout) for rank in range(16)]
    cells = [f"S{place.pp_rank} R{place.dp_rank} C{place.cp_rank}" for place in places]
    found = re.findall(r"S\d+ R\d+ C\d+", str(drawn.svg))
    assert found == cells
    assert "context-parallel groups of 4" in str(drawn.svg)
    assert any("the 4 ranks with the same S, R" in note for note in drawn.notes)
    assert " C0" not in str(layout_map(Layout(dp=8)).svg)


def test_cells_name_the_experts_that_a_device_holds() -> None:
    drawn = layout_map(Layout(tp=2, dp=4, ep=2, etp=2))
    found = re.findall(r"E[\d.]+(?=<)", str(drawn.svg))
    assert found == 2 * ["E0.0", "E0.1", "E1.0", "E1.1"]
    assert "expert-parallel groups of 2, expert-tensor-parallel groups of 2" in str(drawn.svg)
    (note,) = (note for note in drawn.notes if note.startswith("E "))
    assert "the 2 shares of each layer's experts" in note
    assert note.endswith("After the dot: the 2 parts of their weights.")
    assert re.findall(r"E[\d.]+(?=<)", str(layout_map(Layout(dp=4, ep=4)).svg)) == [
        "E0",
        "E1",
        "E2",
        "E3",
    ]
    alone = layout_map(Layout(tp=2, dp=2, etp=2))
    assert re.findall(r"E[\d.]+(?=<)", str(alone.svg)) == 2 * ["E0", "E1"]
    assert "the same part of all experts" in alone.notes[-1]
    assert " E0" not in str(layout_map(Layout(dp=4)).svg)

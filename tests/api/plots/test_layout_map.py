from __future__ import annotations

import re

import pytest

from api.plots.layout_map import layout_map
from search_spaces.mesh import coordinates
from search_spaces.spec.layout import Layout


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

from __future__ import annotations

from search_spaces.mesh import coordinates, global_rank, ranks_per_node
from search_spaces.spec.layout import Layout


def test_ranks_and_coordinates_are_one_to_one_and_tp_varies_fastest() -> None:
    layout = Layout(tp=2, pp=3, dp=4)
    places = [coordinates(rank, layout) for rank in range(layout.num_devices)]
    assert [global_rank(place, layout) for place in places] == list(range(24))
    assert [p.tp_rank for p in places[:4]] == [0, 1, 0, 1]
    assert [p.dp_rank for p in places[:8:2]] == [0, 1, 2, 3]
    assert [p.pp_rank for p in places[::8]] == [0, 1, 2]


def test_ranks_fill_one_node_after_the_other() -> None:
    assert ranks_per_node(32, 4) == 8
    assert ranks_per_node(10, 4) == 3

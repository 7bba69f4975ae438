from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict

import pytest

from search_spaces.mesh import (
    coordinates,
    expert_coordinates,
    expert_rank,
    global_rank,
    ranks_per_node,
)
from search_spaces.spec.layout import Layout


def test_ranks_and_coordinates_are_one_to_one_and_tp_varies_fastest() -> None:
    layout = Layout(tp=2, pp=3, dp=4)
    places = [coordinates(rank, layout) for rank in range(layout.num_devices)]
    assert [global_rank(place, layout) for place in places] == list(range(24))
    assert [p.tp_rank for p in places[:4]] == [0, 1, 0, 1]
    assert [p.dp_rank for p in places[:8:2]] == [0, 1, 2, 3]
    assert [p.pp_rank for p in places[::8]] == [0, 1, 2]


def test_tensor_columns_vary_faster_than_tp() -> None:
    layout = Layout(tp=2, tp_columns=3, cp=2, dp=2, pp=2)
    places = [coordinates(rank, layout) for rank in range(layout.num_devices)]
    assert [global_rank(place, layout) for place in places] == list(range(48))
    assert [p.column_rank for p in places[:6]] == [0, 1, 2, 0, 1, 2]
    assert [p.tp_rank for p in places[:12:3]] == [0, 1, 0, 1]
    assert [p.cp_rank for p in places[:24:6]] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("axis", "groups"),
    [
        ("etp_rank", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("ep_rank", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("edp_rank", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_groups_of_experts_are_those_of_megatron_lm(axis: str, groups: list[list[int]]) -> None:
    """RankGenerator(tp=2, ep=2, dp=2, pp=2, cp=1, order="tp-cp-ep-dp-pp") of its parallel_state."""
    layout = Layout(tp=2, cp=2, dp=2, pp=2, ep=2, etp=2)
    found = defaultdict(list)
    for rank in range(layout.num_devices):
        place = asdict(expert_coordinates(rank, layout))
        del place[axis]
        found[coordinates(rank, layout).pp_rank, *place.values()].append(rank)
    assert sorted(found.values()) == groups + [[8 + rank for rank in group] for group in groups]


@pytest.mark.parametrize(
    "layout", [Layout(tp=4, dp=3, ep=6), Layout(cp=2, dp=4, pp=3, ep=2, etp=2), Layout(pp=2)]
)
def test_ranks_and_coordinates_of_experts_are_one_to_one(layout: Layout) -> None:
    places = [
        (expert_coordinates(rank, layout), coordinates(rank, layout).pp_rank)
        for rank in range(layout.num_devices)
    ]
    assert len(set(places)) == layout.num_devices
    assert [expert_rank(*place, layout) for place in places] == list(range(layout.num_devices))


def test_ranks_fill_one_node_after_the_other() -> None:
    assert ranks_per_node(32, 4) == 8
    assert ranks_per_node(10, 4) == 3

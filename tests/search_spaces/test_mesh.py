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


@pytest.mark.parametrize(
    ("layout", "order"),
    [
        (Layout(tp=2, pp=3, dp=4), {"tp": 1, "dp": 2, "pp": 8}),
        (Layout(tp=2, tp_columns=3, cp=2, dp=2, pp=2), {"column": 1, "tp": 3, "cp": 6, "dp": 12}),
        # RankGenerator(tp=2, cp=1, dp=3, pp=2, order="tp-cp-ep-pp-dp") of its parallel_state.
        (Layout(tp=2, dp=3, pp=2, rank_order="tp_cp_pp_dp"), {"tp": 1, "pp": 2, "dp": 4}),
    ],
    ids=lambda value: value.key if isinstance(value, Layout) else "",
)
def test_ranks_and_coordinates_are_one_to_one_and_vary_in_their_order(
    layout: Layout, order: dict[str, int]
) -> None:
    """Of each axis, how many ranks share a coordinate before the next one."""
    places = [coordinates(rank, layout) for rank in range(layout.num_devices)]
    assert [global_rank(place, layout) for place in places] == list(range(layout.num_devices))
    for axis, ranks in order.items():
        size = layout.tp_columns if axis == "column" else getattr(layout, axis)
        found = [getattr(place, f"{axis}_rank") for place in places]
        assert found == [rank // ranks % size for rank in range(layout.num_devices)], axis


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
    "layout",
    [
        Layout(tp=4, dp=3, ep=6),
        Layout(cp=2, dp=4, pp=3, ep=2, etp=2),
        Layout(pp=2),
        Layout(tp=2, cp=2, dp=3, pp=2, ep=2, etp=2, rank_order="tp_cp_pp_dp"),
    ],
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

"""Where groups are on nodes: against the trainer's own mesh, rank by rank."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.rank_mesh import coordinates, expert_coordinates
from layout_tuner.workers.simulation.placement import Axis, Placement

LAYOUTS = [
    Layout(num_nodes=4, tp=2, cp=2, pp=2, dp=4, ep=4, etp=2),
    Layout(num_nodes=4, tp=2, cp=2, pp=2, dp=4, ep=2, rank_order="tp_cp_pp_dp"),
    Layout(num_nodes=4, tp=2, tp_columns=2, pp=4, dp=2),
    Layout(num_nodes=6, tp=4, pp=3, dp=4, rank_order="tp_cp_pp_dp"),
]


def expected_groups(layout: Layout, axis: Axis) -> set[frozenset[int]]:
    """Ranks that agree in everything but the axis."""
    groups: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for rank in range(layout.num_devices):
        at = coordinates(rank, layout)
        key = {
            "tp": (at.column_rank, at.cp_rank, at.dp_rank, at.pp_rank),
            "tp_columns": (at.tp_rank, at.cp_rank, at.dp_rank, at.pp_rank),
            "cp": (at.column_rank, at.tp_rank, at.dp_rank, at.pp_rank),
            "data": (at.column_rank, at.tp_rank, at.pp_rank),
        }
        if axis in ("etp", "ep", "edp"):
            of = expert_coordinates(rank, layout)
            every = {"etp": of.etp_rank, "ep": of.ep_rank, "edp": of.edp_rank}
            groups[(at.pp_rank, *(v for name, v in every.items() if name != axis))].add(rank)
        else:
            groups[key[axis]].add(rank)
    return {frozenset(group) for group in groups.values()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_and_their_groups_are_those_of_the_trainers_mesh(layout: Layout) -> None:
    # Models with experts have no tensor columns.
    axes_of_experts = () if layout.tp_columns > 1 else ("etp", "ep", "edp")
    for axis in ("tp", "tp_columns", "cp", "data", *axes_of_experts):
        found = Placement(layout, 8).groups(axis)
        assert {frozenset(group) for group in found.tolist()} == expected_groups(layout, axis), axis
    ranks = Placement(layout, 8).ranks
    for rank in range(layout.num_devices):
        at = coordinates(rank, layout)
        index = np.argwhere(ranks == rank)[0].tolist()
        assert index == [at.dp_rank, at.pp_rank, at.cp_rank, at.tp_rank, at.column_rank]


def test_a_place_counts_nodes_ranks_and_the_groups_that_share_a_nodes_cards() -> None:
    usual = Placement(Layout(num_nodes=4, tp=2, pp=4, dp=4), 8)
    assert usual.place("tp").is_inside
    assert usual.place("data").is_inside
    assert [usual.senders(rank) for rank in range(3)] == [(8, True)] * 3
    other = Placement(Layout(num_nodes=4, tp=2, pp=4, dp=4, rank_order="tp_cp_pp_dp"), 8)
    place = other.place("data")
    assert (place.num_nodes, place.here, place.crossing) == (4, 1, 8)
    assert [other.senders(rank)[1] for rank in range(3)] == [False] * 3


def test_ranks_that_share_zero_shards_are_neighbours_and_their_copies_lie_apart() -> None:
    shards, copies = Placement(Layout(num_nodes=4, dp=32), 8).shards("data", 8)
    assert (shards.size, shards.is_inside) == (8, True)
    assert (copies.size, copies.num_nodes, copies.crossing) == (4, 4, 8)


def test_places_on_levels_are_those_of_domains_and_larger_units() -> None:
    trays = CLUSTER_PRESETS["gb200"]
    placement = Placement.on(Layout(num_nodes=64, tp=4, pp=4, dp=16, ep=64), trays)
    assert placement.units == (64,)
    assert placement.place("ep").is_inside
    assert placement.place("data").is_inside
    assert [placement.senders(rank) for rank in range(3)] == [(64, 1)] * 3
    wide = Placement.on(Layout(num_nodes=64, dp=256), trays).place("data")
    assert (wide.num_nodes, wide.here, wide.crossing) == (4, 64, 1)
    without = Placement.on(Layout(num_nodes=64, dp=256), CLUSTER_PRESETS["alps"])
    assert (without.units, without.place("data").num_nodes) == ((), 64)


def test_places_on_a_dragonfly_have_its_groups_and_packages() -> None:
    frontier = CLUSTER_PRESETS["frontier"]
    placement = Placement.on(Layout(num_nodes=384, tp=2, tp_columns=4, pp=3, dp=128), frontier)
    assert placement.units == (8, 1024)
    assert [placement.senders(rank)[1] for rank in range(3)] == [2, 2, 2]
    assert [placement.place(axis).is_apart for axis in ("tp", "tp_columns")] == [True, False]
    (group,) = placement.place("data").outer
    assert (group.num_nodes, group.devices) == (1, 1024)
    (wide,) = Placement.on(Layout(num_nodes=384, tp=8, dp=384), frontier).place("data").outer
    assert (wide.num_nodes, wide.here, wide.crossing) == (3, 128, 8)

"""Probes of several nodes in a network of levels: the groups that they take."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest

from layout_tuner.workers.launchers.simulated import SimulatedLauncher
from layout_tuner.workers.packing.devices import choose_nodes
from layout_tuner.workers.packing.packer import Packer
from layout_tuner.workers.packing.topology import Topology
from layout_tuner.workers.simulation.simulated_cluster import SimulatedCluster
from tests.workers.packing.test_packer import make_request, nodes_of, packer_of, start


def packer_in(*groups: str) -> Packer:
    """Nodes each in the leaf and spine of its word, as "aX"."""
    packer = packer_of(*[8] * len(groups))
    packer.set_levels(["leaf", "spine"], [(leaf, spine) for leaf, spine in groups])
    return packer


def spans(nodes: Sequence[int], levels: np.ndarray) -> list[int]:
    """Groups of each level, the largest level first."""
    return [len({int(level[node]) for node in nodes}) for level in levels[::-1]]


@pytest.mark.parametrize("seed", range(60))
def test_no_set_of_free_nodes_spans_fewer_groups(seed: int) -> None:
    rng = random.Random(seed)
    leaves = [rng.randrange(5) for _ in range(10)]
    levels = np.array([leaves, [leaf // 2 for leaf in leaves]])
    free = np.array([rng.random() < 0.8 for _ in leaves])
    count = rng.randint(1, int(free.sum()))
    chosen = choose_nodes(free, count, levels)
    assert chosen is not None
    assert len(set(chosen)) == count
    assert free[list(chosen)].all()
    fewest = min(spans(each, levels) for each in combinations(np.flatnonzero(free).tolist(), count))
    assert spans(chosen, levels) == fewest


def test_among_many_groups_the_largest_and_one_that_fits_are_taken() -> None:
    leaves = np.repeat(np.arange(60), [12, 11, 4, *[3] * 57])
    chosen = choose_nodes(np.ones(len(leaves), dtype=bool), 27, leaves[None])
    assert sorted(set(leaves[list(chosen or ())])) == [0, 1, 2]


def test_the_fullest_domain_that_is_large_enough_is_taken() -> None:
    packer = packer_in(*["aX"] * 4, *["bX"] * 3, *["cY"] * 4)
    assert nodes_of(start(packer, make_request(1, nodes=3))[1]) == [4, 5, 6]
    assert nodes_of(start(packer, make_request(2, nodes=4))[2]) == [0, 1, 2, 3], "of spine X"


def test_two_domains_that_just_suffice_leave_a_whole_one() -> None:
    packer = packer_in(*["aX"] * 4, *["bX"] * 3, *["cX"] * 2)
    assert nodes_of(start(packer, make_request(1, nodes=5))[1]) == [4, 5, 6, 7, 8]


def test_two_domains_get_as_many_nodes_where_both_have_them() -> None:
    packer = packer_in(*["aX"] * 5, *["bX"] * 4)
    placed = start(packer, make_request(1, nodes=8))[1]
    assert packer.spans(placed) == "spans 2 of leaf (4 + 4 nodes), 1 of spine (8 nodes)"


def test_a_domain_with_few_nodes_gives_all_of_them() -> None:
    packer = packer_in(*["aX"] * 5, *["bX"] * 2)
    assert nodes_of(start(packer, make_request(1, nodes=6))[1]) == [0, 1, 2, 3, 5, 6]


def test_nodes_of_a_domain_stand_together() -> None:
    packer = packer_in("aX", "bX", "aX", "bX")
    assert nodes_of(start(packer, make_request(1, nodes=4))[1]) == [0, 2, 1, 3]


def test_a_probe_of_several_nodes_says_what_it_spans() -> None:
    packer = packer_in(*["aX"] * 2, *["bX"] * 2, "cY")
    placed = start(packer, make_request(1, nodes=3))[1]
    assert packer.spans(placed) == "spans 2 of leaf (1 + 2 nodes), 1 of spine (3 nodes)"


def test_a_probe_of_one_node_spans_nothing() -> None:
    packer = packer_in("aX", "bX")
    assert packer.spans(start(packer, make_request(1))[1]) == ""


def test_leaves_of_one_name_in_two_spines_are_two() -> None:
    packer = packer_in("aX", "aY")
    placed = start(packer, make_request(1, nodes=2))[1]
    assert packer.spans(placed) == "spans 2 of leaf (1 + 1 nodes), 2 of spine (1 + 1 nodes)"


def test_without_levels_nothing_is_said() -> None:
    packer = packer_of(8, 8)
    assert packer.spans(start(packer, make_request(1, nodes=2))[1]) == ""


def test_simulated_nodes_lie_in_the_domains_of_their_cluster() -> None:
    machine = SimulatedCluster.of("gb200", num_nodes=40, seed=1)
    launcher = SimulatedLauncher(machine, first_node=16, num_nodes=4, clock=lambda: 0.0)
    assert Topology.of(machine.cluster).names == ("domain",)
    assert [node.labels["domain"][-1] for node in launcher.nodes] == ["0", "0", "1", "1"]

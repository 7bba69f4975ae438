"""Probes of different sizes share an allocation: all or nothing, in order, none starved."""

from __future__ import annotations

from typing import Any

import pytest

from layout_tuner.workers.packing.packer import MAX_LOANS, Packer
from layout_tuner.workers.packing.request import PackRequest, Placement, Room, Share


def packer_of(*sizes: int, share_nodes: bool = True, switches: str = "") -> Packer:
    """Nodes n0, n1, ... of so many devices, each below the switch of its letter."""
    packer = Packer(share_nodes=share_nodes)
    for node, num_devices in enumerate(sizes):
        packer.add_node(num_devices, name=f"n{node}")
    if switches:
        packer.set_levels(["switch"], [(switch,) for switch in switches])
    return packer


def make_request(key: int, *, nodes: int = 1, devices: int = 0, **changes: Any) -> PackRequest:
    """A probe of whole nodes of 8 devices, or of so many devices, of 100 s at most."""
    fields = {"at_most_s": 100.0, **changes}
    return PackRequest(key=key, num_nodes=nodes, num_devices=devices or 8 * nodes, **fields)


def start(
    packer: Packer, *requests: PackRequest, now_s: float = 0.0, ends_at_s: float | None = None
) -> dict[object, Placement]:
    for request in requests:
        packer.submit(request)
    return dict(packer.place(now_s, ends_at_s))


def nodes_of(placement: Placement) -> list[int]:
    return [share.node for share in placement]


def packer_says(packer: Packer, request: PackRequest, *, ends_at_s: float | None = None) -> str:
    start(packer, request, ends_at_s=ends_at_s)
    return packer.why_waiting(0.0, ends_at_s)[request.key]


def test_small_probes_fill_a_node_before_the_next_is_begun() -> None:
    placed = start(packer_of(8, 8, 8, 8), *(make_request(key, devices=2) for key in range(5)))
    assert placed[0] == (Share.of_first(0, 2),)
    assert [nodes_of(placed[key]) for key in range(5)] == [[0], [0], [0], [0], [1]]


def test_a_probe_of_two_devices_gets_the_two_of_one_package() -> None:
    placed = start(packer_of(8), make_request(1, devices=1), make_request(2, devices=2))
    assert placed[2][0].devices == (2, 3)


def test_an_aligned_run_on_another_node_is_better_than_one_that_is_not() -> None:
    packer = packer_of(8, 8)
    start(packer, make_request(1, devices=3), make_request(2, devices=4))
    packer.release(1)
    start(packer, make_request(3, devices=1), make_request(4, devices=1))  # 0: 0 and 1; free: 2, 3
    assert start(packer, make_request(5, devices=4))[5] == (Share.of_first(1, 4),)


def test_a_probe_takes_the_smallest_gap_that_fits() -> None:
    packer = packer_of(8)
    start(packer, make_request(1, devices=4), make_request(2, devices=2))
    start(packer, make_request(3, devices=2))
    packer.release(1)
    packer.release(3)  # free: 0-3 and 6-7
    assert start(packer, make_request(4, devices=2))[4][0].devices == (6, 7)


def test_whole_nodes_are_neighbours_if_they_can_be_and_one_is_of_the_smallest_run() -> None:
    packer = packer_of(8, 8, 8, 8, 8, 8)
    start(packer, make_request(1), make_request(2), make_request(3))
    packer.release(1)  # free: 0, and 3 to 5
    assert nodes_of(start(packer, make_request(4, nodes=2))[4]) == [3, 4]
    assert nodes_of(start(packer, make_request(5, nodes=2))[5]) == [0, 5]
    packer.release(4)
    packer.release(2)  # free: 1, and 3 and 4
    assert nodes_of(start(packer, make_request(6))[6]) == [1]


def test_the_last_node_of_a_larger_probe_holds_the_ranks_that_are_left_and_nobody_else() -> None:
    packer = packer_of(8, 8)
    placed = start(packer, make_request(1, nodes=2, devices=13), make_request(2, devices=1))
    assert placed.keys() == {1}
    assert [len(share.devices) for share in placed[1]] == [7, 6]


def test_nodes_that_are_not_shared_hold_one_probe_and_have_room_only_when_they_are_empty() -> None:
    packer = packer_of(8, 8, share_nodes=False)
    placed = start(packer, make_request(0, devices=2))
    assert placed[0][0].devices == (0, 1)
    assert packer.room(0.0, None) == Room(nodes=1, devices=8, longest_s=None)
    placed = start(packer, make_request(1, devices=2), make_request(2, devices=2))
    assert {key: nodes_of(placement) for key, placement in placed.items()} == {1: [1]}
    packer.withdraw(2)
    assert packer.room(0.0, None) == Room(nodes=0, devices=0, longest_s=None)


def test_ended_probes_free_devices_and_withdrawn_ones_never_start() -> None:
    packer = packer_of(8)
    start(packer, *(make_request(key) for key in (1, 2, 3)))
    with pytest.raises(ValueError, match="1 waits or runs already"):
        packer.submit(make_request(1))
    packer.withdraw(2)
    packer.release(1)
    assert start(packer).keys() == {3}


def test_unusable_nodes_are_not_used_and_what_runs_there_keeps_its_devices() -> None:
    packer = packer_of(8, 8)
    start(packer, make_request(1, devices=2))
    packer.set_usable(0, usable=False)
    assert nodes_of(start(packer, make_request(2, devices=2))[2]) == [1]
    packer.set_usable(0, usable=True)
    assert start(packer, make_request(3, devices=2))[3] == (Share(node=0, devices=(2, 3)),)
    assert packer.holders(0) == [1, 3]


def test_nodes_may_be_of_different_sizes_and_join_later() -> None:
    packer = packer_of(4, 8, 8)
    assert nodes_of(start(packer, make_request(1, nodes=2))[1]) == [1, 2]
    assert "needs 3 whole nodes" in packer_says(packer, make_request(2, nodes=3))
    placed = start(packer, make_request(3, devices=4), make_request(4, devices=6))
    assert {key: nodes_of(at) for key, at in placed.items()} == {3: [0]}, "although 2 is older"
    assert packer.add_node(8) == 3
    assert nodes_of(start(packer)[4]) == [3]


def test_a_probe_avoids_the_nodes_where_it_failed() -> None:
    packer = packer_of(8, 8, 8)
    placed = start(packer, make_request(1, devices=2, avoid=frozenset({0})))
    assert nodes_of(placed[1]) == [1]
    assert nodes_of(start(packer, make_request(2, avoid=frozenset({0})))[2]) == [2]


def test_what_cannot_end_before_the_allocation_does_is_not_started() -> None:
    packer = packer_of(8, 8, 8, 8)
    long, short = make_request(1, at_most_s=60.1), make_request(2, at_most_s=60.0)
    assert start(packer, long, short, now_s=40.0, ends_at_s=100.0).keys() == {2}


def test_younger_probes_start_on_what_the_oldest_does_not_need() -> None:
    packer = packer_of(8, 8, 8, 8)
    start(packer, make_request(1, nodes=2))
    placed = start(packer, make_request(2, nodes=3), make_request(3, at_most_s=1e6))
    assert placed.keys() == {3}


def test_younger_probes_do_not_delay_the_oldest() -> None:
    packer = packer_of(8, 8, 8, 8)
    start(packer, make_request(1, nodes=2, at_most_s=100))
    oldest = make_request(2, nodes=4)
    # The oldest needs all nodes in 100 s: only what is certainly gone by then starts before it.
    long = make_request(3, at_most_s=101, expected_s=10)
    assert start(packer, oldest, long, make_request(4, at_most_s=100)).keys() == {4}


def test_a_small_oldest_probe_has_a_reservation_too() -> None:
    packer = packer_of(8)
    start(packer, make_request(1, devices=5, at_most_s=10), make_request(2, devices=2))
    placed = start(packer, make_request(3, devices=4), make_request(4, devices=1))
    assert placed.keys() == {4}
    packer.release(1)
    assert start(packer, now_s=10.0)[3] == (Share.of_first(0, 4),)


def test_reserved_devices_are_lent_a_limited_number_of_times() -> None:
    packer = packer_of(8, 8)
    start(packer, make_request(-1, at_most_s=1e6))
    start(packer, make_request(-2, nodes=2))
    for key in range(MAX_LOANS):
        assert start(packer, make_request(key, at_most_s=1.0)).keys() == {key}
        packer.release(key)
    assert start(packer, make_request(MAX_LOANS, at_most_s=1.0)) == {}
    packer.release(-1)
    assert start(packer).keys() == {-2}


@pytest.mark.parametrize(("expected_s", "started"), [(None, {3}), (10, set())])
def test_a_reservation_that_comes_too_late_keeps_nobody_waiting(
    expected_s: float | None, started: set[int]
) -> None:
    packer = packer_of(8, 8)
    start(packer, make_request(1, at_most_s=90, expected_s=expected_s))
    wide = make_request(2, nodes=2, at_most_s=50)
    placed = start(packer, wide, make_request(3, at_most_s=100), ends_at_s=100.0)
    assert placed.keys() == started


def test_a_probe_says_what_it_waits_for() -> None:
    packer = packer_of(8, 8, 8, 8)
    start(packer, make_request(1, nodes=2, at_most_s=340))
    assert packer_says(packer, make_request(2, nodes=4)) == (
        "waits for 4 whole nodes: 2 are free, enough are in 340 s at the latest"
    )
    assert packer_says(packer, make_request(3, nodes=2, at_most_s=1000)) == (
        "waits for 2 whole nodes: 2 are free, kept for a probe that has waited longer"
    )
    packer = packer_of(8)
    start(packer, make_request(1, devices=7, at_most_s=30))
    assert packer_says(packer, make_request(2, devices=2)) == (
        "waits for 2 contiguous devices of a node: 1 is free, enough are in 30 s at the latest"
    )


def test_a_probe_says_why_it_can_not_start() -> None:
    assert packer_says(packer_of(8, 8, 8, 8), make_request(1, at_most_s=600), ends_at_s=95) == (
        "does not fit before the allocation ends in 95 s: it may take 600 s"
    )
    assert packer_says(packer_of(8, 8, 8, 8), make_request(1, nodes=5)) == (
        "needs 5 whole nodes, and the allocation has 4 nodes of 8 devices or more"
    )
    packer = packer_of(8, 8, 8, 8)
    packer.set_usable(2, usable=False, reason="quarantined")
    assert packer_says(packer, make_request(1, nodes=4)) == (
        "needs more nodes than are usable: 3 of 4; n2 is quarantined"
    )


def test_room_is_what_another_probe_could_use_now() -> None:
    packer = packer_of(8, 8, 8, 8)
    assert packer.room(0.0, None) == Room(nodes=4, devices=8, longest_s=None)
    start(packer, make_request(1, nodes=2), make_request(2, devices=4))
    assert packer.room(40.0, 100.0) == Room(nodes=1, devices=8, longest_s=60.0)


def test_room_leaves_out_what_is_reserved_but_for_a_while_when_there_is_nothing_else() -> None:
    packer = packer_of(8, 8, 8, 8)
    start(packer, make_request(1, nodes=2, at_most_s=30), make_request(2, nodes=3))
    assert packer.room(0.0, None) == Room(nodes=1, devices=8, longest_s=None)
    packer.withdraw(2)
    start(packer, make_request(3, nodes=4))
    assert packer.room(10.0, None) == Room(nodes=2, devices=8, longest_s=20.0)


@pytest.mark.parametrize("devices", [(), (0, 2), (1, 0), (-1, 0), (1, 1)])
def test_a_share_is_contiguous_and_ascending_and_of_a_node(devices: tuple[int, ...]) -> None:
    assert Share.of_first(3, 2) == Share(node=3, devices=(0, 1))
    with pytest.raises(ValueError, match="contiguous"):
        Share(node=0, devices=devices)
    with pytest.raises(ValueError, match="node=-1"):
        Share(node=-1, devices=(0,))


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (1, [7]),  # the smallest switch that is large enough leaves the others to larger probes
        (3, [0, 2, 4]),
        (4, [1, 3, 5, 6]),
        (6, [0, 2, 4, 1, 5, 6]),  # of as few switches as possible, as many of each, together
    ],
)
def test_a_probe_of_several_nodes_stays_below_one_switch(nodes: int, expected: list[int]) -> None:
    placed = start(packer_of(*[8] * 8, switches="abababbc"), make_request(1, nodes=nodes))
    assert nodes_of(placed[1]) == expected


def test_below_a_switch_and_without_switches_nodes_are_neighbours() -> None:
    packer = packer_of(*[8] * 5, switches="abaab")
    assert nodes_of(start(packer, make_request(1, nodes=2))[1]) == [1, 4], "of the smaller switch"
    assert nodes_of(start(packer, make_request(2, nodes=2))[2]) == [2, 3]
    alone = packer_of(*[8] * 5)
    start(alone, make_request(1, nodes=1))
    assert nodes_of(start(alone, make_request(2, nodes=3))[2]) == [1, 2, 3]

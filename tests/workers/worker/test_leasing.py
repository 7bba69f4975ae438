"""Which trial is asked for next."""

from __future__ import annotations

import pytest

from search_spaces.protocol.worker_messages import LeaseRequest, RoomBody
from workers.packing.request import Room
from workers.worker.leasing import END_WITHIN_S, MOST_WAITING, next_request

NO_ROOM = Room(nodes=0, devices=0, longest_s=None)
ALL = Room(nodes=2, devices=4, longest_s=None)


def ask(**changes: object) -> LeaseRequest | None:
    asked = {"usable": [4, 4], "all_usable": True, "num_waiting": 0, "room": ALL, "left_s": None}
    return next_request(**{**asked, **changes})


def test_the_oldest_trial_that_fits_the_allocation_comes_first() -> None:
    asked = ask()
    assert asked is not None
    assert (asked.room, asked.longest_s) == (None, None)


def test_one_is_asked_for_while_nothing_is_free() -> None:
    asked = ask(room=NO_ROOM)
    assert asked is not None
    assert asked.room is None


def test_while_one_waits_only_what_starts_at_once_is_asked_for() -> None:
    room = Room(nodes=1, devices=3, longest_s=60.0)
    asked = ask(num_waiting=1, room=room)
    assert asked is not None
    assert asked.room == RoomBody(nodes=1, devices=3)
    assert asked.longest_s == 60.0 - asked.wait_s - END_WITHIN_S
    assert ask(num_waiting=1, room=NO_ROOM) is None


def test_never_more_than_a_couple_wait() -> None:
    assert ask(num_waiting=MOST_WAITING) is None


def test_nodes_that_are_lost_are_not_asked_for() -> None:
    asked = ask(usable=[4], all_usable=False)
    assert asked is not None
    assert asked.room == RoomBody(nodes=1, devices=4)
    assert ask(usable=[], all_usable=False) is None


@pytest.mark.parametrize(("left_s", "longest_s"), [(100.0, 85.0), (15.0, None), (1.0, None)])
def test_a_trial_that_comes_at_the_end_of_the_wait_still_ends_in_time(
    left_s: float, longest_s: float | None
) -> None:
    asked = ask(left_s=left_s)
    assert (None if asked is None else asked.longest_s) == longest_s

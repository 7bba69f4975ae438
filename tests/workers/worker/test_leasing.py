"""Which trial is asked for next."""

from __future__ import annotations

from typing import Any

import pytest

from search_spaces.protocol.worker_messages import LeaseRequest, RoomBody
from workers.packing.request import Room
from workers.worker.leasing import END_WITHIN_S, MOST_WAITING, next_request

NO_ROOM = Room(nodes=0, devices=0, longest_s=None)
ALL = Room(nodes=2, devices=4, longest_s=None)


def ask(**changes: object) -> LeaseRequest | None:
    asked = {"usable": [4, 4], "all_usable": True, "num_waiting": 0, "room": ALL, "left_s": None}
    return next_request(**{**asked, **changes})


@pytest.mark.parametrize(
    ("changes", "room"),
    [
        pytest.param({}, None, id="the-oldest-that-fits-comes-first"),
        pytest.param({"room": NO_ROOM}, None, id="nothing-is-free"),
        pytest.param({"usable": [4], "all_usable": False}, RoomBody(nodes=1, devices=4), id="lost"),
    ],
)
def test_any_trial_is_requested_while_none_waits(
    changes: dict[str, Any], room: RoomBody | None
) -> None:
    asked = ask(**changes)
    assert (asked.room, asked.longest_s) == (room, None)


def test_while_a_trial_waits_only_trials_that_start_at_once_are_requested() -> None:
    asked = ask(num_waiting=1, room=Room(nodes=1, devices=3, longest_s=60.0))
    assert asked.room == RoomBody(nodes=1, devices=3)
    assert asked.longest_s == 60.0 - asked.wait_s - END_WITHIN_S


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"num_waiting": 1, "room": NO_ROOM}, id="nothing-free"),
        pytest.param({"num_waiting": MOST_WAITING}, id="enough-waiting"),
        pytest.param({"usable": [], "all_usable": False}, id="all-nodes-lost"),
        pytest.param({"left_s": 1.0}, id="no-time-left"),
    ],
)
def test_no_trial_is_requested_that_could_not_start_soon(changes: dict[str, Any]) -> None:
    assert ask(**changes) is None


def test_a_trial_leased_at_the_last_ends_in_time() -> None:
    asked = ask(left_s=100.0)
    assert asked.longest_s == 85.0
    assert ask(left_s=15.0) is None

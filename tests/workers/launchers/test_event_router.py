"""Each group hears of its own ranks and nodes, and of nothing else."""

from __future__ import annotations

import threading

import pytest

from workers.errors import NodeLostError
from workers.launchers.base import NodeEvent
from workers.launchers.event_router import EventRouter
from workers.ranks.json_lines import Document


def report(group: str, number: int) -> Document:
    return {"event": "report", "group": group, "rank": 0, "document": {"number": number}}


def numbers(events: list[NodeEvent]) -> list[int]:
    return [event.document["document"]["number"] for event in events]


def test_the_events_of_one_node_reach_their_groups_in_order() -> None:
    router = EventRouter()
    router.open("a", [0, 1])
    router.open("b", [1])
    router.deliver(1, [report("a", 1), report("b", 2), report("a", 3), report("gone", 4)])
    assert numbers(router.poll("b", 0)) == [2]
    assert numbers(router.poll("a", 0)) == [1, 3]
    assert router.poll("a", 0) == []


def test_a_lost_node_is_told_once_to_its_groups_and_to_no_other() -> None:
    router = EventRouter()
    router.open("a", [0, 1])
    router.open("b", [1])
    router.open("c", [0])
    router.open("closed", [1])
    router.close("closed")
    router.close("closed")
    router.lose(1, "cut off")
    router.lose(1, "said again")
    for group in ("a", "b"):
        lost = {"event": "lost", "message": "cut off"}
        assert router.poll(group, 0) == [NodeEvent(node=1, document=lost)]
        assert router.poll(group, 0) == []
    assert router.poll("c", 0) == []
    assert router.lost() == {1: "cut off"}


def test_no_group_starts_on_a_lost_node_until_it_is_found_again() -> None:
    router = EventRouter()
    router.lose(1, "cut off")
    with pytest.raises(NodeLostError, match="cut off") as refused:
        router.open("a", [0, 1])
    assert refused.value.node == 1
    router.find(1)
    assert router.lost() == {}
    router.open("a", [0, 1])
    router.deliver(1, [report("a", 5)])
    assert numbers(router.poll("a", 0)) == [5]


def test_an_event_wakes_the_group_that_waits_for_it() -> None:
    router = EventRouter()
    router.open("a", [0])
    router.open("b", [0])
    told: list[NodeEvent] = []
    waiting = threading.Thread(target=lambda: told.extend(router.poll("a", 60)))
    waiting.start()
    router.deliver(0, [report("b", 1)])
    router.deliver(0, [report("a", 2)])
    waiting.join(30)
    assert numbers(told) == [2]

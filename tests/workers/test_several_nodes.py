"""A group over two nodes: two zygotes that know nothing of each other, each with its own ranks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.workers.process_checks import RANK_PROGRAMS, is_alive, run_group, wait_until_gone
from workers.json_lines import Document
from workers.launchers.base import Node, NodeEvent
from workers.launchers.local import LocalNodes
from workers.rank_task import RankTask


class TwoNodes:
    """Two zygotes of this machine as two nodes, at addresses of their own."""

    def __init__(self) -> None:
        self.parts = [LocalNodes(num_devices=2, rank_entry=RANK_PROGRAMS) for _ in range(2)]
        for part in self.parts:
            part.ranks.wait_until_ready()

    @property
    def nodes(self) -> Sequence[Node]:
        return [
            replace(part.nodes[0], name=f"node{index}", address=f"127.0.2.{index + 1}")
            for index, part in enumerate(self.parts)
        ]

    def wait_until_ready(self) -> None:
        for part in self.parts:
            part.wait_until_ready()

    def start(self, tasks: Mapping[int, Sequence[RankTask]]) -> None:
        for node, on_node in tasks.items():
            self.parts[node].start({0: on_node})

    def tell(self, nodes: Sequence[int], group: str, document: Document) -> None:
        for node in nodes:
            self.parts[node].tell([0], group, document)

    def poll(self, nodes: Sequence[int], group: str, timeout_s: float) -> list[NodeEvent]:
        return [
            NodeEvent(node=node, document=event.document)
            for node in nodes
            for event in self.parts[node].poll([0], group, min(timeout_s, 0.005))
        ]

    def end(self, nodes: Sequence[int], group: str) -> dict[int, str]:
        tails: dict[int, str] = {}
        for node in nodes:
            tails.update(self.parts[node].end([0], group))
        return tails

    def lost(self) -> Mapping[int, str]:
        return {node: why for node, part in enumerate(self.parts) for why in part.lost().values()}

    def recover(self, node: int) -> None:
        self.parts[node].recover(0)

    def close(self) -> None:
        for part in self.parts:
            part.close()


@pytest.fixture
def nodes() -> Iterator[TwoNodes]:
    nodes = TwoNodes()
    yield nodes
    pids = [pid for part in nodes.parts for pid in part.ranks.pids.values()]
    nodes.close()
    wait_until_gone(pids)


def test_every_rank_on_both_nodes_is_told_the_address_of_the_first(nodes: TwoNodes) -> None:
    end = run_group(nodes, "meet", num_ranks=4, num_nodes=2)
    assert end.failure is None
    where = {"address": "127.0.2.1", "port": 4321}
    assert [end.results[rank]["told"] for rank in range(4)] == [where] * 4


def test_a_failure_on_one_node_ends_the_ranks_of_the_other(nodes: TwoNodes) -> None:
    hanging: list[int] = []
    started = time.monotonic()
    end = run_group(
        nodes,
        "hang",
        by_rank={"3": "fail-late"},
        num_ranks=4,
        num_nodes=2,
        on_event=lambda event: hanging.append(event["pid"]),
    )
    assert time.monotonic() - started < 1.0
    assert end.failure is not None
    assert (end.failure.rank, end.failure.node) == (3, 1)
    assert "about to fail" in end.log_tail
    assert len(hanging) == 3
    assert not any(map(is_alive, hanging))


def test_the_loss_of_one_node_ends_the_ranks_of_the_other(nodes: TwoNodes) -> None:
    hanging: list[int] = []

    def lose_node_1_when_all_hang(event: dict[str, Any]) -> None:
        hanging.append(event["pid"])
        if len(hanging) == 4:
            os.kill(nodes.parts[1].ranks.pids["zygote"], signal.SIGKILL)

    end = run_group(nodes, "hang", num_ranks=4, num_nodes=2, on_event=lose_node_1_when_all_hang)
    assert end.failure is not None
    assert (end.failure.reason, end.failure.node) == ("node_lost", 1)
    wait_until_gone(hanging, 2)
    assert list(nodes.lost()) == [1]
    nodes.recover(1)
    assert not nodes.lost()
    assert run_group(nodes, "succeed", num_ranks=4, num_nodes=2).failure is None


def test_a_group_that_can_start_on_one_node_only_is_started_on_none(nodes: TwoNodes) -> None:
    os.kill(nodes.parts[1].ranks.pids["zygote"], signal.SIGKILL)
    wait_until_gone([nodes.parts[1].ranks.pids["zygote"]])
    hanging: list[int] = []
    end = run_group(
        nodes,
        "hang",
        num_ranks=4,
        num_nodes=2,
        on_event=lambda event: hanging.append(event["pid"]),
    )
    assert end.failure is not None
    assert end.failure.reason == "node_lost"
    assert not any(map(is_alive, hanging))

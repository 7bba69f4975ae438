"""A group over two nodes: two zygotes that know nothing of each other, each with its own ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.workers.process_checks import RANK_PROGRAMS, is_alive, run_group, wait_until_gone
from tests.workers.several_local_nodes import SeveralLocalNodes

pytestmark = pytest.mark.ranks


@pytest.fixture
def nodes() -> Iterator[SeveralLocalNodes]:
    nodes = SeveralLocalNodes([RANK_PROGRAMS] * 2, num_devices=2)
    nodes.wait_until_ready()
    yield nodes
    pids = [pid for part in nodes.parts for pid in part.ranks.pids.values()]
    nodes.close()
    wait_until_gone(pids)


def test_every_rank_on_both_nodes_is_told_the_address_of_the_first(
    nodes: SeveralLocalNodes,
) -> None:
    end = run_group(nodes, "meet", num_ranks=4, num_nodes=2)
    assert end.failure is None
    where = {"address": "127.0.2.1", "port": 4321}
    assert [end.results[rank]["told"] for rank in range(4)] == [where] * 4


def test_a_failure_on_one_node_ends_the_ranks_of_the_other(nodes: SeveralLocalNodes) -> None:
    hanging: list[int] = []
    end = run_group(
        nodes,
        "hang",
        by_rank={"3": "fail-late"},
        num_ranks=4,
        num_nodes=2,
        deadline_s=3600.0,  # long after the test's: the failure ends them, or nothing does
        on_event=lambda event: hanging.append(event["pid"]),
    )
    assert end.failure is not None
    assert (end.failure.rank, end.failure.node) == (3, 1)
    assert "about to fail" in end.log_tail
    assert len(hanging) == 3
    assert not any(map(is_alive, hanging))


def test_the_loss_of_one_node_ends_the_ranks_of_the_other(nodes: SeveralLocalNodes) -> None:
    hanging: list[int] = []

    def lose_node_1_when_all_hang(event: dict[str, Any]) -> None:
        hanging.append(event["pid"])
        if len(hanging) == 4:
            os.kill(nodes.parts[1].ranks.pids["zygote"], signal.SIGKILL)

    end = run_group(nodes, "hang", num_ranks=4, num_nodes=2, on_event=lose_node_1_when_all_hang)
    assert end.failure is not None
    assert (end.failure.reason, end.failure.node) == ("node_lost", 1)
    wait_until_gone(hanging)
    assert list(nodes.lost()) == [1]
    nodes.recover(1)
    assert not nodes.lost()
    assert run_group(nodes, "succeed", num_ranks=4, num_nodes=2).failure is None


def test_a_group_that_can_start_on_one_node_only_is_started_on_none(
    nodes: SeveralLocalNodes,
) -> None:
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

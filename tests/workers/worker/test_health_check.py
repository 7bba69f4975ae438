"""Nodes are checked by real ranks: devices, memory, products and links."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from statistics import median

import pytest

from tests.kit.local_ranks import SeveralLocalNodes, make_cluster, several_nodes
from tests.kit.waiting import wait_until
from workers.launchers.group_launcher import GroupLauncher
from workers.worker.node_health import check_nodes, problems, rounds_of_pairs

pytestmark = pytest.mark.ranks

RANK = "workers.rank_jobs.rank:main"
CROWDED = "tests.workers.crowded_rank:main"


def make_launcher(nodes: SeveralLocalNodes, devices_per_node: int = 1) -> GroupLauncher:
    return GroupLauncher(nodes, make_cluster(devices_per_node, 3), allow_sharing=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[SeveralLocalNodes]:
    with several_nodes([RANK, RANK]) as nodes:
        yield nodes


def never() -> bool:
    return False


def test_links_are_measured_unless_the_check_is_cancelled(nodes: SeveralLocalNodes) -> None:
    reports = check_nodes(make_launcher(nodes), [0, 1], cancelled=never)
    rates = [report.between_gbytes_per_s for report in reports.values()]
    assert rates[0] == rates[1]
    assert rates[0] > 0.01
    (cancelled,) = check_nodes(make_launcher(nodes), [0], cancelled=lambda: True).values()
    assert "cancelled" in cancelled.failure


@pytest.mark.slow
def test_a_node_without_its_core_is_found_when_it_joins_others() -> None:
    with several_nodes([RANK, RANK, CROWDED], num_devices=1) as nodes:
        launcher = make_launcher(nodes)
        known = check_nodes(launcher, [0, 1], cancelled=never)
        joined = check_nodes(launcher, [2], cancelled=never, known=known)
    assert joined.keys() == {2}
    assert joined[2].failure == ""
    assert problems({**known, **joined})[2].startswith("device 0 computes ")
    others = median(known[node].gemm_tflops[0] for node in (0, 1))
    assert joined[2].gemm_tflops[0] < others / 2


def test_a_lost_node_fails_its_check_and_the_others_pass(nodes: SeveralLocalNodes) -> None:
    os.kill(nodes.parts[1].ranks.pids["zygote"], signal.SIGKILL)
    wait_until("the loss is known", lambda: 1 in nodes.lost())
    reports = check_nodes(make_launcher(nodes), [0, 1], cancelled=never)
    assert reports[0].failure == ""
    assert reports[1].failure.startswith("node_lost: ")
    assert "the health check failed: node_lost" in problems(reports)[1]
    nodes.recover(1)


def test_the_devices_of_a_node_are_measured_together(nodes: SeveralLocalNodes) -> None:
    launcher = make_launcher(nodes, devices_per_node=2)
    report = check_nodes(launcher, [0], cancelled=never)[0]
    peak, source = launcher.peak("fp32", never)
    assert (report.num_devices, report.num_devices_seen) == (2, 2)
    assert report.link_gbytes_per_s is not None
    assert 0 < report.memory_free_bytes <= report.memory_bytes
    assert (peak, source) == (report.peak_tflops, "measured matmul (fp32)")


def test_every_node_is_paired_with_its_neighbours_and_once_at_a_time() -> None:
    assert rounds_of_pairs([3]) == []
    for count in range(2, 9):
        rounds = rounds_of_pairs(range(count))
        for pairs in rounds:
            busy = [node for pair in pairs for node in pair]
            assert len(busy) == len(set(busy)), count
        paired = {frozenset(pair) for pairs in rounds for pair in pairs}
        ring = {frozenset(pair) for pair in [*pairwise(range(count)), (count - 1, 0)]}
        assert paired == ring, count

"""Nodes are checked by real ranks; what one measured of itself is held against the others."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import pytest

from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.worker.node_health import (
    HealthReport,
    check_nodes,
    problems,
    rounds_of_pairs,
)
from tests.kit.local_ranks import SeveralLocalNodes, make_cluster, several_nodes
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.ranks

RANK = "layout_tuner.workers.rank_jobs.rank:main"
CROWDED = "tests.workers.odd_rank:crowded"


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


GIB = 2**30
FAILED = HealthReport(device="cuda", num_devices=2, failure="crashed: rank 3 was killed")


def make_report(**changes: Any) -> HealthReport:
    report: dict[str, Any] = {
        "device": "cuda",
        "num_devices": 2,
        "num_devices_seen": 2,
        "memory_bytes": 64 * GIB,
        "memory_free_bytes": 63 * GIB,
        "gemm_tflops": (150.0, 151.0),
        "link_gbytes_per_s": 100.0,
        "between_gbytes_per_s": 80.0,
    }
    return HealthReport(**report | changes)


def beside_others(report: HealthReport, num_others: int = 3) -> dict[int, str]:
    others = {node: make_report() for node in range(1, 1 + num_others)}
    return problems({0: report, **others})


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (make_report(num_devices_seen=1, gemm_tflops=(150.0,)), "1 of 2 devices were found"),
        (
            make_report(memory_free_bytes=32 * GIB),
            "a device has 32 GiB of its 64 GiB free, less than 90%",
        ),
        (FAILED, "the health check failed: crashed: rank 3 was killed"),
    ],
)
def test_what_is_a_problem_by_itself_needs_no_other_node(report: HealthReport, why: str) -> None:
    assert problems({0: report}) == {0: why}
    assert beside_others(report) == {0: why}


@pytest.mark.parametrize(
    ("changes", "num_others", "why"),
    [
        (
            {"gemm_tflops": (150.0, 90.0)},
            3,
            "device 1 computes 90 TFLOP/s in a product, less than 80% of the other nodes' 150",
        ),
        ({"link_gbytes_per_s": 40.0}, 3, "between its devices it sends 40 GB/s, less than 50%"),
        ({"between_gbytes_per_s": 10.0}, 3, "to other nodes it sends 10 GB/s, less than 50%"),
        (
            {"device": "cpu", "memory_free_bytes": 20 * GIB},
            3,
            "a device has 20 GiB free, less than 50% of the other nodes' 63 GiB",
        ),
        pytest.param({}, 3, "", id="alike"),
        pytest.param({"device": "cpu", "memory_free_bytes": 8 * GIB}, 0, "", id="a-host-has-users"),
        pytest.param({"gemm_tflops": (15.0, 15.0)}, 1, "", id="of-two-nodes-neither-is-slow"),
        pytest.param({"link_gbytes_per_s": None, "between_gbytes_per_s": None}, 3, "", id="none"),
        pytest.param(
            {"gemm_tflops": (math.nan, 150.0), "link_gbytes_per_s": math.nan}, 3, "", id="nan"
        ),
    ],
)
def test_a_node_slower_than_the_others_is_a_problem_and_no_other_is(
    changes: dict[str, Any], num_others: int, why: str
) -> None:
    found = beside_others(make_report(**changes), num_others)
    assert found.keys() == ({0} if why else set())
    assert found.get(0, "").startswith(why)


def test_nodes_whose_check_failed_are_no_reference_for_others() -> None:
    slow = make_report(gemm_tflops=(15.0, 15.0))
    assert problems({0: slow, 1: make_report(), 2: FAILED}).keys() == {2}


def test_a_rate_that_is_no_number_keeps_no_slow_node_from_being_found() -> None:
    odd = make_report(gemm_tflops=(math.nan, 150.0), link_gbytes_per_s=math.nan)
    slow = make_report(gemm_tflops=(10.0, 150.0))
    reports = {0: slow, 1: odd, **{node: make_report() for node in range(2, 5)}}
    assert problems(reports).keys() == {0}

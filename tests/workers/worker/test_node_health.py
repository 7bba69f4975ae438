"""What a node measured of itself is held against what the others did."""

from __future__ import annotations

import math
from typing import Any

import pytest

from workers.worker.node_health import HealthReport, problems

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

"""What a node measured of itself is held against what the others did."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest

from workers.worker.node_health import HealthReport, problems

GIB = 2**30


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


def test_nodes_that_are_alike_are_fit() -> None:
    assert beside_others(make_report()) == {}


def test_a_device_that_is_missing_is_a_problem_by_itself() -> None:
    report = make_report(num_devices_seen=1, gemm_tflops=(150.0,))
    assert problems({0: report}) == {0: "1 of 2 devices were found"}


def test_memory_that_somebody_holds_is_a_problem_by_itself() -> None:
    report = make_report(memory_free_bytes=32 * GIB)
    why = "a device has 32 GiB of its 64 GiB free, less than 90%"
    assert problems({0: report}) == {0: why}


def test_a_host_may_have_other_users() -> None:
    assert problems({0: make_report(device="cpu", memory_free_bytes=8 * GIB)}) == {}


def test_a_check_that_failed_is_a_problem_by_itself() -> None:
    report = HealthReport(device="cuda", num_devices=8, failure="crashed: rank 3 was killed")
    why = "the health check failed: crashed: rank 3 was killed"
    assert problems({0: report, 1: make_report(), 2: make_report()}) == {0: why}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"gemm_tflops": (150.0, 90.0)},
            "device 1 computes 90 TFLOP/s in a product, less than 80% of the other nodes' 150",
        ),
        ({"link_gbytes_per_s": 40.0}, "between its devices it sends 40 GB/s, less than 50%"),
        ({"between_gbytes_per_s": 10.0}, "to other nodes it sends 10 GB/s, less than 50%"),
        (
            {"device": "cpu", "memory_free_bytes": 20 * GIB},
            "a device has 20 GiB free, less than 50% of the other nodes' 63 GiB",
        ),
    ],
)
def test_a_node_that_is_slower_than_the_others_is_a_problem(
    changes: dict[str, Any], why: str
) -> None:
    assert beside_others(make_report(**changes))[0].startswith(why)


def test_of_two_nodes_neither_is_called_slow() -> None:
    assert beside_others(make_report(gemm_tflops=(15.0, 15.0)), num_others=1) == {}


def test_nodes_whose_check_failed_are_nobodys_measure() -> None:
    failed = HealthReport(device="cuda", num_devices=2, failure="node_lost: gone")
    reports = {0: make_report(gemm_tflops=(15.0, 15.0)), 1: make_report(), 2: failed}
    assert problems(reports).keys() == {2}


def test_links_that_were_not_measured_are_not_compared() -> None:
    report = make_report(link_gbytes_per_s=None, between_gbytes_per_s=None)
    assert beside_others(report) == {}


def test_a_report_is_plain_json() -> None:
    assert asdict(make_report())["gemm_tflops"] == (150.0, 151.0)


def test_a_rate_that_is_no_number_is_compared_with_nothing() -> None:
    odd = make_report(gemm_tflops=(math.nan, 150.0), link_gbytes_per_s=math.nan)
    assert beside_others(odd) == {}
    slow = make_report(gemm_tflops=(10.0, 150.0))
    reports = {0: slow, 1: odd, **{node: make_report() for node in range(2, 5)}}
    assert problems(reports).keys() == {0}

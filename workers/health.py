"""Whether a node is fit for probes: what it measured of itself, against what the others did."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isnan
from statistics import median
from typing import Any, Final

LEAST_GEMM: Final = {"cuda": 0.8, "cpu": 0.3}
"""Of the others' median rate in a product, what each device must reach; cores have other users."""
LEAST_LINK: Final = {"cuda": 0.5, "cpu": 0.1}
"""Of the others' median rates, what a node's links must reach: they vary more."""
LEAST_MEMORY: Final = 0.5
"""Of the others' median, what of its memory each device must have free."""
LEAST_FREE: Final = {"cuda": 0.9, "cpu": 0.05}
"""Of its memory, what each device must have free; the host's memory has other users, too."""
FEWEST_OTHERS: Final = 2
"""Nodes that a node is compared with at least: of two that differ, either may be the better."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthReport:
    """What a node measured of itself, all of its devices at once."""

    device: str
    """What ranks compute on: "cpu" or "cuda"."""
    num_devices: int
    """Devices that it should have."""
    num_devices_seen: int = 0
    """Devices that its ranks found."""
    memory_bytes: int = 0
    """Memory of a device; the least of them."""
    memory_free_bytes: int = 0
    """Of that, free before any probe; the least of them."""
    gemm_tflops: tuple[float, ...] = ()
    """Usual rate of each device in square matrix products; its best one may have been undisturbed."""
    peak_tflops: float = 0.0
    """The best that a device reached; the median of them."""
    peak_source: str = ""
    """How that was measured, in the words of a measurement's peak."""
    link_gbytes_per_s: float | None = None
    """Rate between the devices of the node; None: it has one, or it was not measured."""
    between_gbytes_per_s: float | None = None
    """Rate from this node to another; None: there is none, or it was not measured."""
    failure: str = ""
    """Why the check did not get to its end; empty: it did."""

    def to_mapping(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)


def problems(reports: Mapping[int, HealthReport]) -> dict[int, str]:
    """The nodes that are not fit for probes, and why; each is compared with all the others."""
    found: dict[int, str] = {}
    whole = [report for report in reports.values() if not report.failure]
    memory, gemm, inside, between = (
        _Rates(whole, rates) for rates in (_memory, _gemm, _inside, _between)
    )
    for node, report in reports.items():
        why = _own_problem(report)
        if why is None and len(whole) > FEWEST_OTHERS:
            why = (
                _little_memory(report, memory)
                or _slow_device(report, gemm)
                or _slow_link(report, inside, "between its devices")
                or _slow_link(report, between, "to other nodes")
            )
        if why is not None:
            found[node] = why
    return found


RatesOf = Callable[[HealthReport], Sequence[float]]


def _memory(report: HealthReport) -> Sequence[float]:
    return (report.memory_free_bytes,)


def _gemm(report: HealthReport) -> Sequence[float]:
    return report.gemm_tflops


def _inside(report: HealthReport) -> Sequence[float]:
    return () if report.link_gbytes_per_s is None else (report.link_gbytes_per_s,)


def _between(report: HealthReport) -> Sequence[float]:
    return () if report.between_gbytes_per_s is None else (report.between_gbytes_per_s,)


class _Rates:
    """What all nodes measured of one thing, to be held against one of them.

    Sorted once, and not once a node: there may be a thousand. What is no number counts for nothing.
    """

    def __init__(self, reports: Iterable[HealthReport], of: RatesOf) -> None:
        self._of = of
        self._ascending = sorted(rate for report in reports for rate in self.of(report))

    def of(self, report: HealthReport) -> list[float]:
        """The rates of one."""
        return [rate for rate in self._of(report) if not isnan(rate)]

    def of_others(self, report: HealthReport) -> list[float]:
        """The rates of all but one, ascending."""
        others = self._ascending.copy()
        for rate in self.of(report):
            del others[bisect_left(others, rate)]
        return others


def _own_problem(report: HealthReport) -> str | None:
    if report.failure:
        return f"the health check failed: {report.failure}"
    if report.num_devices_seen < report.num_devices:
        return f"{report.num_devices_seen} of {report.num_devices} devices were found"
    if report.memory_free_bytes < LEAST_FREE[report.device] * report.memory_bytes:
        return (
            f"a device has {_gib(report.memory_free_bytes)} GiB of its "
            f"{_gib(report.memory_bytes)} GiB free, less than {LEAST_FREE[report.device]:.0%}"
        )
    return None


def _little_memory(report: HealthReport, memory: _Rates) -> str | None:
    usual = median(memory.of_others(report))
    if report.memory_free_bytes >= LEAST_MEMORY * usual:
        return None
    return (
        f"a device has {_gib(report.memory_free_bytes)} GiB free, less than "
        f"{LEAST_MEMORY:.0%} of the other nodes' {_gib(usual)} GiB (median)"
    )


def _slow_device(report: HealthReport, gemm: _Rates) -> str | None:
    others = gemm.of_others(report)
    if not others or not report.gemm_tflops:
        return None
    rate = median(others)
    slowest = min(range(len(report.gemm_tflops)), key=report.gemm_tflops.__getitem__)
    own = report.gemm_tflops[slowest]
    if not own < LEAST_GEMM[report.device] * rate:  # what is no number is no problem
        return None
    return (
        f"device {slowest} computes {own:.3g} TFLOP/s in a product, less than "
        f"{LEAST_GEMM[report.device]:.0%} of the other nodes' {rate:.3g} (median)"
    )


def _slow_link(report: HealthReport, links: _Rates, which: str) -> str | None:
    least, rates = LEAST_LINK[report.device], links.of_others(report)
    for own in links.of(report):
        if len(rates) >= FEWEST_OTHERS and own < least * median(rates):
            return (
                f"{which} it sends {own:.3g} GB/s, less than {least:.0%} of the other nodes' "
                f"{median(rates):.3g} (median)"
            )
    return None


def _gib(memory_bytes: float) -> str:
    return f"{memory_bytes / 2**30:.3g}"

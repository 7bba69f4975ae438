"""Whether a node is fit for probes: what it measured of itself, against what the others did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
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
    for node, report in reports.items():
        others = [one for other, one in reports.items() if other != node and not one.failure]
        why = _own_problem(report)
        if why is None and len(others) >= FEWEST_OTHERS:
            why = _problem_beside(report, others)
        if why is not None:
            found[node] = why
    return found


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


def _problem_beside(report: HealthReport, others: Sequence[HealthReport]) -> str | None:
    memory = median(one.memory_free_bytes for one in others)
    if report.memory_free_bytes < LEAST_MEMORY * memory:
        return (
            f"a device has {_gib(report.memory_free_bytes)} GiB free, less than "
            f"{LEAST_MEMORY:.0%} of the other nodes' {_gib(memory)} GiB (median)"
        )
    rate = median(rate for one in others for rate in one.gemm_tflops)
    slowest = min(range(len(report.gemm_tflops)), key=report.gemm_tflops.__getitem__)
    own = report.gemm_tflops[slowest]
    if own < LEAST_GEMM[report.device] * rate:
        return (
            f"device {slowest} computes {own:.3g} TFLOP/s in a product, less than "
            f"{LEAST_GEMM[report.device]:.0%} of the other nodes' {rate:.3g} (median)"
        )
    inside = _slow_link(report, others, "between its devices", lambda one: one.link_gbytes_per_s)
    return inside or _slow_link(
        report, others, "to other nodes", lambda one: one.between_gbytes_per_s
    )


def _slow_link(
    report: HealthReport,
    others: Iterable[HealthReport],
    which: str,
    rate_of: Callable[[HealthReport], float | None],
) -> str | None:
    own, least = rate_of(report), LEAST_LINK[report.device]
    rates = [rate for one in others if (rate := rate_of(one)) is not None]
    if own is None or len(rates) < FEWEST_OTHERS or own >= least * median(rates):
        return None
    return (
        f"{which} it sends {own:.3g} GB/s, less than {least:.0%} of the other nodes' "
        f"{median(rates):.3g} (median)"
    )


def _gib(memory_bytes: float) -> str:
    return f"{memory_bytes / 2**30:.3g}"

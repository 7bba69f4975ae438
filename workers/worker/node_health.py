"""Checks whether nodes are fit for probes.

Nodes are measured before their first probe: each alone, then in pairs, suspicious ones twice. The
measurements of each node are compared with those of the other nodes.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import isnan
from statistics import median
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import Precision
from layout_tuner.workers.errors import WorkerError
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.launchers.launcher_nodes import Cancelled
from layout_tuner.workers.packing.request import Share
from layout_tuner.workers.ranks.rank_task import Device

_LOG: Final = logging.getLogger(__name__)

LEAST_GEMM: Final = {"cuda": 0.8, "cpu": 0.3}
"""Share of the other nodes' median rate in a matrix product that each device must reach; the limit
for cores is lower since other processes use them."""
LEAST_LINK: Final = {"cuda": 0.5, "cpu": 0.1}
"""Share of the other nodes' median rate that a node's links must reach; links vary more."""
LEAST_MEMORY: Final = 0.5
"""Share of the other nodes' median free memory that each device must have free."""
LEAST_FREE: Final = {"cuda": 0.9, "cpu": 0.05}
"""Share of its memory that each device must have free; other processes use the host's memory."""
FEWEST_OTHERS: Final = 2
"""Fewest other nodes for a comparison: of two nodes that differ, either may be at fault."""

PRECISIONS: Final[Mapping[Device, Precision]] = {"cpu": "fp32", "cuda": "bf16"}
"""Precision of the matrix products that are timed."""

_CHECK_WITHIN_S: Final = 120.0
"""The first use of a GPU may take a minute."""

_AT_ONCE: Final = 32
"""Groups of ranks that run at a time: a site may limit the steps of a job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthReport:
    """Measurements of a node, with all of its devices at once."""

    device: str
    """Kind of the devices: "cpu" or "cuda"."""
    num_devices: int
    """Devices that it should have."""
    num_devices_seen: int = 0
    """Devices that its ranks found."""
    memory_bytes: int = 0
    """Memory of a device: the minimum over the devices."""
    memory_free_bytes: int = 0
    """Free memory of a device before any probe: the minimum over the devices."""
    gemm_tflops: tuple[float, ...] = ()
    """Median rate of each device in square matrix products; the best may be an outlier."""
    peak_tflops: float = 0.0
    """Best rate of a device: the median over the devices."""
    peak_source: str = ""
    """How the peak was measured, as in a measurement's `peak_source`."""
    link_gbytes_per_s: float | None = None
    """Rate between the devices of the node; None: it has one device, or it was not measured."""
    between_gbytes_per_s: float | None = None
    """Rate from this node to another; None: there is no other, or it was not measured."""
    failure: str = ""
    """Why the check failed; empty: it did not."""


def problems(reports: Mapping[int, HealthReport]) -> dict[int, str]:
    """The nodes that are not fit for probes, and why. Each is compared with all others."""
    found: dict[int, str] = {}
    whole = [report for report in reports.values() if not report.failure]
    memory = _Rates(whole, lambda report: (report.memory_free_bytes,))
    gemm = _Rates(whole, lambda report: report.gemm_tflops)
    inside = _Rates(whole, lambda report: _known(report.link_gbytes_per_s))
    between = _Rates(whole, lambda report: _known(report.between_gbytes_per_s))
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


def _known(rate: float | None) -> Sequence[float]:
    return () if rate is None else (rate,)


class _Rates:
    """One kind of measurement of all nodes, for the comparison of each node with the others.

    Sorted once for all comparisons, since there may be a thousand nodes. NaN is left out.
    """

    def __init__(self, reports: Iterable[HealthReport], of: RatesOf) -> None:
        self._of = of
        self._ascending = sorted(rate for report in reports for rate in self.of(report))

    def of(self, report: HealthReport) -> list[float]:
        return [rate for rate in self._of(report) if not isnan(rate)]

    def of_others(self, report: HealthReport) -> list[float]:
        """The rates of all other nodes, ascending."""
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
    if not own < LEAST_GEMM[report.device] * rate:  # False for NaN
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


def check_nodes(
    launcher: GroupLauncher,
    nodes: Sequence[int],
    cancelled: Cancelled,
    known: Mapping[int, HealthReport] | None = None,
) -> dict[int, HealthReport]:
    """Measures some idle nodes; `problems` evaluates the reports.

    They are compared with each other and with `known` reports of other nodes.

    A suspicious node is measured a second time while the others are idle; that result counts.
    """
    check = _Check(launcher, cancelled)
    reports = check.each_alone(nodes)
    check.in_pairs(reports)
    measured_twice: set[int] = set()
    # After some were measured again, another node may be slower than the rest.
    while suspicious := problems({**(known or {}), **reports}).keys() & set(nodes) - measured_twice:
        check.again(reports, sorted(suspicious))
        measured_twice |= suspicious
    is_one_of_cores = len(nodes) == 1 and launcher.device == "cpu"
    if is_one_of_cores and (report := reports[nodes[0]]).peak_tflops:
        # Probes need not measure it again.
        launcher.keep_measured_peak(PRECISIONS["cpu"], report.peak_tflops, report.peak_source)
    return reports


class _Check:
    """The measurements of one check."""

    def __init__(self, launcher: GroupLauncher, cancelled: Cancelled) -> None:
        self._launcher = launcher
        self._cancelled = cancelled

    def each_alone(self, nodes: Sequence[int]) -> dict[int, HealthReport]:
        """Measures every node without links to others, all nodes at the same time."""
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="health") as pool:
            return dict(zip(nodes, pool.map(self._alone, nodes), strict=True))

    def in_pairs(self, reports: dict[int, HealthReport]) -> None:
        """Measures links: each node exchanges data with two others, and the better rate counts.

        So a node is slow only where both links are, and a slow node does not make its neighbours
        slow.
        """
        fit = [node for node, report in reports.items() if not report.failure]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="health") as pool:
            for pairs in rounds_of_pairs(fit):
                for pair, rate in zip(pairs, pool.map(self._between, pairs), strict=True):
                    for node in pair:
                        reports[node] = _better_link(reports[node], rate)

    def again(self, reports: dict[int, HealthReport], suspicious: Sequence[int]) -> None:
        """Measures suspicious nodes one after the other, and their links to a node that is not."""
        partner = next((node for node in reports if node not in suspicious), None)
        for node in suspicious:
            if self._cancelled():
                return
            report = self._alone(node)
            if partner is not None and not report.failure:
                report = _better_link(report, self._between((node, partner)))
            reports[node] = report

    def _alone(self, node: int) -> HealthReport:
        device = self._launcher.device
        share = Share.of_first(node, self._launcher.nodes[node].capacity(device))
        report = HealthReport(device=device, num_devices=len(share.devices))
        results, failure = self._run({"precision": PRECISIONS[device]}, (share,))
        if failure:
            return replace(report, failure=failure)
        seen = [result for result in results if result["seen"]]
        links = [result["link_gbytes_per_s"] for result in seen if "link_gbytes_per_s" in result]
        return replace(
            report,
            num_devices_seen=len(seen),
            memory_bytes=min((result["memory_bytes"] for result in seen), default=0),
            memory_free_bytes=min((result["memory_free_bytes"] for result in seen), default=0),
            gemm_tflops=tuple(result["gemm_tflops"] for result in seen),
            peak_tflops=median([result["peak_tflops"] for result in seen] or [0.0]),
            peak_source=next((result["peak_source"] for result in seen), ""),
            link_gbytes_per_s=min(links, default=None),
        )

    def _between(self, pair: tuple[int, int]) -> float | None:
        """Gigabytes a second from all devices of a node to those of another; None: not measured."""
        device = self._launcher.device
        num_devices = min(self._launcher.nodes[node].capacity(device) for node in pair)
        shares = tuple(Share.of_first(node, num_devices) for node in pair)
        results, failure = self._run({"between": True}, shares)
        if failure:
            # Either node may be at fault, or neither; each has another link.
            _LOG.warning("the link between nodes %d and %d was not measured: %s", *pair, failure)
            return None
        return num_devices * min(float(result["between_gbytes_per_s"]) for result in results)

    def _run(
        self, job: Mapping[str, Any], shares: tuple[Share, ...]
    ) -> tuple[list[Mapping[str, Any]], str]:
        """The results of the ranks, and why the job failed (empty: it did not)."""
        try:
            end = self._launcher.run_job(
                {"kind": "health", **job},
                shares=shares,
                deadline_s=_CHECK_WITHIN_S,
                on_event=lambda _: None,
                cancelled=self._cancelled,
            )
        except WorkerError as error:
            return [], str(error)
        if end.failure is not None:
            return [], f"{end.failure.reason}: {end.failure.message}"
        return [end.results[rank] for rank in sorted(end.results)], ""


def rounds_of_pairs(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Pairs each node with its two neighbours in a ring, in rounds with at most one pair a node."""
    if len(nodes) < 2:
        return []
    ring = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    if len(nodes) == 2:
        return [ring[:1]]
    last = [ring.pop()] if len(nodes) % 2 else []
    return [pairs for pairs in (ring[::2], ring[1::2], last) if pairs]


def _better_link(report: HealthReport, rate: float | None) -> HealthReport:
    rates = [one for one in (report.between_gbytes_per_s, rate) if one is not None]
    return replace(report, between_gbytes_per_s=max(rates, default=None))

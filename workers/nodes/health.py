"""Checks nodes before their first probe: each by itself, then in pairs, the suspicious ones twice."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median
from typing import Any, Final

from search_spaces.layout import Precision
from workers.errors import WorkerError
from workers.health import HealthReport, problems
from workers.launchers.base import Cancelled
from workers.launchers.group_launcher import GroupLauncher
from workers.packing.shares import Share
from workers.rank_task import Device

_LOG: Final = logging.getLogger(__name__)

PRECISIONS: Final[Mapping[Device, Precision]] = {"cpu": "fp32", "cuda": "bf16"}
"""Of the products that are timed."""
_WITHIN_S: Final = 120.0
"""The first use of a GPU may take a minute."""
_AT_ONCE: Final = 32
"""Groups of ranks that run at a time: a site may limit the steps of a job."""


def check_nodes(
    launcher: GroupLauncher,
    nodes: Sequence[int],
    *,
    cancelled: Cancelled,
    known: Mapping[int, HealthReport] | None = None,
) -> dict[int, HealthReport]:
    """Checks some nodes, which nobody else may use meanwhile; ask `problems` what is wrong with them.

    A suspicious node is measured a second time, alone, and that counts.

    Args:
        launcher: of the nodes.
        nodes: their positions.
        cancelled: whether to end.
        known: reports of other nodes, to compare with.
    """
    check = _Check(launcher, cancelled)
    reports = check.each_alone(nodes)
    check.in_pairs(reports)
    measured_twice: set[int] = set()
    # One that was like the others may be behind those that have been measured again, alone.
    while suspicious := problems({**(known or {}), **reports}).keys() & set(nodes) - measured_twice:
        check.again(reports, sorted(suspicious))
        measured_twice |= suspicious
    if len(nodes) == 1:
        check.keep_peak(reports[nodes[0]])
    return reports


class _Check:
    """The measurements of one check."""

    def __init__(self, launcher: GroupLauncher, cancelled: Cancelled) -> None:
        self._launcher = launcher
        self._cancelled = cancelled

    def each_alone(self, nodes: Sequence[int]) -> dict[int, HealthReport]:
        """Every node by itself, all of them at once."""
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="health") as pool:
            return dict(zip(nodes, pool.map(self._alone, nodes), strict=True))

    def in_pairs(self, reports: dict[int, HealthReport]) -> None:
        """The links between nodes: each sends to two others, and the better one counts.

        So a node is slow only when both are, and a slow one does not make its neighbours so.
        """
        fit = [node for node, report in reports.items() if not report.failure]
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="health") as pool:
            for pairs in rounds_of_pairs(fit):
                for pair, rate in zip(pairs, pool.map(self._between, pairs), strict=True):
                    for node in pair:
                        reports[node] = _better_link(reports[node], rate)

    def again(self, reports: dict[int, HealthReport], suspicious: Sequence[int]) -> None:
        """Suspicious nodes one after the other, the links to one that is not."""
        partner = next((node for node in reports if node not in suspicious), None)
        for node in suspicious:
            if self._cancelled():
                return
            report = self._alone(node)
            if partner is not None and not report.failure:
                report = _better_link(report, self._between((node, partner)))
            reports[node] = report

    def keep_peak(self, report: HealthReport) -> None:
        """A CPU's peak is what its devices reach together: probes need not measure it again."""
        if self._launcher.device == "cpu" and report.peak_tflops:
            self._launcher.keep_measured_peak(
                PRECISIONS["cpu"], report.peak_tflops, report.peak_source
            )

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
        """Gigabytes a second from all devices of a node to another's; None: it was not measured."""
        device = self._launcher.device
        num_devices = min(self._launcher.nodes[node].capacity(device) for node in pair)
        shares = tuple(Share.of_first(node, num_devices) for node in pair)
        results, failure = self._run({"between": True}, shares)
        if failure:
            # Either may be to blame, or neither: each has another neighbour.
            _LOG.warning("the link between nodes %d and %d was not measured: %s", *pair, failure)
            return None
        return num_devices * min(float(result["between_gbytes_per_s"]) for result in results)

    def _run(
        self, job: Mapping[str, Any], shares: tuple[Share, ...]
    ) -> tuple[list[Mapping[str, Any]], str]:
        """What the ranks found, and why they did not get to their end."""
        try:
            end = self._launcher.run_job(
                {"kind": "health", **job},
                shares=shares,
                deadline_s=_WITHIN_S,
                on_event=lambda _: None,
                cancelled=self._cancelled,
            )
        except WorkerError as error:
            return [], str(error)
        if end.failure is not None:
            return [], f"{end.failure.reason}: {end.failure.message}"
        return [end.results[rank] for rank in sorted(end.results)], ""


def rounds_of_pairs(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Each node with its two neighbours in a ring, in rounds in which each has one of them at most."""
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

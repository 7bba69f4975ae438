"""Constants of a cluster that no machine has, though they are possible: a wrong unit, usually.

The ranges are about ten times wider than what is in use, from a V100 to a GB300 and from one core
to a socket (`cluster_presets`, `device_peaks`). The ranges that are refused are far wider, because
stored clusters must stay readable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from layout_tuner.search_spaces.clusters.cluster import MEASURED_SOURCE, Cluster
from layout_tuner.search_spaces.physical_ranges import Range

_LATENCIES: Final = dict.fromkeys(
    ("host_operation_s", "intra_node_latency_s", "inter_node_latency_s"), Range(1e-8, 0.1, "s")
)
_ACCELERATOR: Final[Mapping[str, Range]] = {
    "peak_flops_per_s": Range(1e12, 1e17, "FLOP/s"),
    "memory_bandwidth_bytes_per_s": Range(5e10, 1e14, "bytes/s"),
    "intra_node_bandwidth_bytes_per_s": Range(1e8, 1e13, "bytes/s"),
    "inter_node_bandwidth_bytes_per_s": Range(1e7, 1e13, "bytes/s"),
    **_LATENCIES,
}
_CPU: Final[Mapping[str, Range]] = {
    "peak_flops_per_s": Range(1e8, 1e14, "FLOP/s"),
    "memory_bandwidth_bytes_per_s": Range(1e8, 1e13, "bytes/s"),
    "intra_node_bandwidth_bytes_per_s": Range(1e6, 1e12, "bytes/s"),
    "inter_node_bandwidth_bytes_per_s": Range(1e6, 1e12, "bytes/s"),
    **_LATENCIES,
}


def unusual_constants(cluster: Cluster) -> str | None:
    """A warning that lists the constants outside of what is usual; None: there are none.

    Measured constants are as they are, whatever the device.
    """
    if cluster.source.startswith(MEASURED_SOURCE):
        return None
    if not (found := "; ".join(_unusual(cluster))):
        return None
    return (
        f"cluster {cluster.name!r} has constants that no known machine has: {found}; are their units "
        "right? The predictions rest on them"
    )


def _unusual(cluster: Cluster) -> Iterator[str]:
    ranges = _CPU if cluster.has_cpu_devices else _ACCELERATOR
    for level in cluster.levels:
        for name in ("bandwidth_bytes_per_s", "latency_s"):
            stated, usual = getattr(level, name), ranges[f"inter_node_{name}"]
            if stated is not None and (problem := usual.problem(stated)):
                yield f"{name}={problem} at level {level.name}"
    for name, usual in ranges.items():
        stated = getattr(cluster, name)
        of_each = stated.items() if isinstance(stated, Mapping) else ((None, stated),)
        for key, value in of_each:
            if problem := usual.problem(value):
                yield f"{name}{'' if key is None else f'[{key}]'}={problem}"

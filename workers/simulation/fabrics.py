"""How long a step of a collective takes by the size of its message: constants of measured networks.

A ring of n ranks takes n - 1 steps, in each of which every rank passes one share on. A step takes a
latency, which depends on the share since libraries change their protocol with it, and the share
over the bandwidth that the ring has.

`MEASURED` is printed by `python -m benchmarks.simulator.fit_collectives` from the bus bandwidths
that the authors of AxoNN (arXiv:2502.08145) logged on Frontier (RCCL) and Perlmutter (NCCL), of
groups that fill their nodes: medians over 16 to 1,024 ranks. On Frontier shares of 64 to 256 KiB
take longer than those of 512 KiB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.level_units import unit_sizes

StepTimes = Mapping[int, float]
"""Microseconds of a step by KiB of the share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The steps of one kind of collective."""

    sizes: tuple[float, ...]
    """Bytes of the share, ascending."""
    latencies_s: tuple[float, ...]
    """Seconds beyond those of the bandwidth, of each size."""
    bytes_per_s: float
    """Bandwidth of the measured ring, which filled its nodes."""

    @classmethod
    def of(cls, measured: StepTimes) -> Self:
        """From measured steps; the largest share has no latency that shows."""
        sizes, times = [1024.0 * kib for kib in measured], [1e-6 * us for us in measured.values()]
        bandwidth = sizes[-1] / times[-1]
        latencies = (max(t - size / bandwidth, 0.0) for size, t in zip(sizes, times, strict=True))
        return cls(sizes=tuple(sizes), latencies_s=tuple(latencies), bytes_per_s=bandwidth)

    @classmethod
    def constant(cls, latency_s: float, bytes_per_s: float) -> Self:
        """Of a network that nobody has measured."""
        return cls(sizes=(1.0,), latencies_s=(latency_s,), bytes_per_s=bytes_per_s)

    def latency_s(self, share_bytes: float) -> float:
        """Latency of a step; between measured sizes on the logarithm of the size."""
        if len(self.sizes) == 1:
            return self.latencies_s[0]
        return float(np.interp(np.log(max(share_bytes, 1.0)), np.log(self.sizes), self.latencies_s))


@dataclass(frozen=True, kw_only=True, slots=True)
class OuterSteps:
    """What a larger level of the network adds to the steps of a collective across nodes."""

    bytes_per_s: float
    """Bandwidth of a device to other units."""
    latency_s: float
    """Latency of a step beyond that of a step between nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric:
    """The steps of a machine's collectives, and what its nodes have."""

    far_gather: Steps
    far_scatter: Steps
    """Across nodes."""
    near_gather: Steps
    near_scatter: Steps
    """Inside a node; their bandwidth is that of a whole node."""
    near_bytes_per_s: Mapping[int, float]
    """Bandwidth inside a node by the ranks of a group, where it is not a whole node."""
    node_cards: int
    """Network cards of a node; a group uses as many as it has ranks there."""
    domain: int = 0
    """Devices of a domain of nodes, which is a node then; 0: a node is one."""
    apart_bytes_per_s: float = math.inf
    """Most bandwidth inside a node of a group without two ranks in one part of it."""
    outer: tuple[OuterSteps, ...] = ()
    """The levels beyond the first one that leaves nodes or domains, smallest first."""
    start_s: float = 1e-5
    """Seconds until a collective's first step (NCCL's `baseLat` is about as long)."""


# fmt: off
MEASURED: Final[Mapping[str, StepTimes]] = {
    "frontier gather across": {
        8: 21.19, 16: 25.01, 32: 35.43, 64: 478, 128: 849.2, 256: 433, 512: 45.69, 1024: 49.51,
        2048: 48.95, 4096: 61.72, 8192: 119.1, 16384: 234.8, 32768: 470.5, 65536: 936.9,
    },
    "frontier gather inside": {
        128: 22.49, 256: 22.86, 512: 24.79, 1024: 29.57, 2048: 37.93, 4096: 58.29, 8192: 101.2,
        16384: 189.6, 32768: 370.4, 65536: 743.8, 131072: 1501,
    },
    "frontier scatter across": {
        8: 8.527, 16: 14.82, 32: 28.08, 64: 105, 128: 351.3, 256: 321, 512: 32.23, 1024: 37.08,
        2048: 40.5, 4096: 58.16, 8192: 110.7, 16384: 215.4, 32768: 427.8, 65536: 859.3,
    },
    "frontier scatter inside": {
        128: 15.72, 256: 17.72, 512: 21.15, 1024: 29.27, 2048: 42.57, 4096: 69.72, 8192: 124.6,
        16384: 233.4, 32768: 452.9, 65536: 895.3, 131072: 1772,
    },
    "perlmutter gather across": {
        8: 7.328, 16: 7.678, 32: 10.59, 64: 11.83, 128: 14.53, 256: 19.79, 512: 22.72, 1024: 26.85,
        2048: 41.48, 4096: 73.68, 8192: 141.7, 16384: 274.8, 32768: 547.8, 65536: 1087,
    },
}
# fmt: on
"""Steps in the order of their shares."""

_NODE_CARDS: Final = {"frontier": 4, "perlmutter": 4}


def fabric(cluster: Cluster, *, far_share: float = 1.0, near_share: float = 1.0) -> Fabric:
    """The network of a cluster.

    Frontier's and Perlmutter's are as measured; of others, the latencies across nodes are those of
    NCCL on Perlmutter, and bandwidths are shares of the described ones. Of levels beyond the first
    one across nodes, bandwidths have the described proportion to those of the first.
    """
    near = {n: near_share * b for n, b in cluster.intra_node_bandwidth_bytes_per_s.items()}
    if not near:
        near = {2: 0.1 * cluster.memory_bandwidth_bytes_per_s}
    node, domain = cluster.devices_per_node, cluster.domain_devices
    levels = list(zip(unit_sizes(cluster), cluster.network[1:], strict=True))
    first, *further = [level for size, level in levels if size >= domain]
    first_rate, first_s = first.bandwidth_bytes_per_s or 0.0, first.latency_s or 0.0
    apart, latency_s = math.inf, cluster.intra_node_latency_s
    for size, level in levels:
        if size < node:
            apart = near_share * (level.bandwidth_bytes_per_s or math.inf)
        elif size < domain:  # of groups with more ranks than a node has
            near[node + 1] = near_share * (level.bandwidth_bytes_per_s or 0.0)
            latency_s = level.latency_s or latency_s
    whole = near[max(near)]
    inside = Steps.constant(latency_s, whole)
    if cluster.name == "frontier":
        steps = [
            Steps.of(MEASURED[f"frontier {kind} {place}"])
            for place in ("across", "inside")
            for kind in ("gather", "scatter")
        ]
    else:
        across = Steps.of(MEASURED["perlmutter gather across"])
        if cluster.name != "perlmutter":
            rate = far_share * (first_rate * domain)
            across = Steps(sizes=across.sizes, latencies_s=across.latencies_s, bytes_per_s=rate)
        steps = [across, across, inside, inside]
    return Fabric(
        far_gather=steps[0],
        far_scatter=steps[1],
        near_gather=steps[2],
        near_scatter=steps[3],
        near_bytes_per_s=near,
        node_cards=_NODE_CARDS.get(cluster.name, domain),
        domain=domain if domain > node else 0,
        apart_bytes_per_s=apart,
        outer=tuple(
            OuterSteps(
                bytes_per_s=steps[0].bytes_per_s
                / domain
                * ((level.bandwidth_bytes_per_s or 0.0) / first_rate),
                latency_s=max((level.latency_s or 0.0) - first_s, 0.0),
            )
            for level in further
        ),
    )

"""What simulated links take for a collective or a transfer, with everybody else on them.

Ranks are placed as the trainer places them: tp varies fastest, then dp, then pp, node after node.
Groups of one kind communicate at the same time, so that those of a node share its links and its way
out; beyond one node the fabric gets slower with every doubling of the nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from search_spaces.cluster import Cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlace:
    """A group of ranks on the nodes: equally spaced, all alike."""

    size: int
    """Ranks of the group."""
    stride: int
    """Devices from one rank of the group to the next."""

    def in_node(self, devices_per_node: int) -> int:
        """Ranks of the group that share a node."""
        return max(min(self.size, devices_per_node // self.stride), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """How fast the links really are."""

    cluster: Cluster
    """What the description says of them."""
    intra_share: float
    """Of the described bandwidth inside a node, that is really there."""
    inter_share: float
    """Of the described bandwidth between nodes, that is really there."""
    congestion: float
    """Share of bandwidth that each doubling of the nodes costs."""
    crowding: float
    """What other groups inside the same node cost, each doubling of their number."""
    intra_latency_s: float
    """Of one message inside a node."""
    inter_latency_s: float
    """Of one message between nodes."""
    half_speed_bytes: float
    """Message at which a link reaches half of its bandwidth."""

    @classmethod
    def draw(cls, cluster: Cluster, rng: np.random.Generator) -> Self:
        """Links of the cluster, as no description has them."""
        return cls(
            cluster=cluster,
            intra_share=rng.uniform(0.6, 1.1),
            inter_share=rng.uniform(0.6, 1.1),
            congestion=rng.uniform(0.03, 0.12),
            crowding=rng.uniform(0.02, 0.15),
            intra_latency_s=rng.uniform(4e-6, 1.2e-5),
            inter_latency_s=rng.uniform(8e-6, 2.5e-5),
            half_speed_bytes=rng.uniform(0.3e6, 3e6),
        )

    def all_reduce_s(self, place: GroupPlace, size_bytes: float) -> float:
        """Seconds of an all-reduce; the library takes a ring or a tree, whichever is faster."""
        if place.size == 1:
            return 0.0
        n, latency, speed = place.size, *self._link(place, size_bytes)
        ring = 2 * (n - 1) * latency + 2 * (n - 1) / n * size_bytes / speed
        depth = math.ceil(math.log2(n))
        tree = 2 * depth * latency + 2.3 * size_bytes / speed
        return min(ring, tree)

    def share_s(self, place: GroupPlace, size_bytes: float) -> float:
        """Seconds of a reduce-scatter or an all-gather of so many bytes in all."""
        if place.size == 1:
            return 0.0
        n, latency, speed = place.size, *self._link(place, size_bytes)
        return (n - 1) * latency + (n - 1) / n * size_bytes / speed

    def hop_s(self, first: int, second: int, senders: int, size_bytes: float) -> float:
        """Seconds from one device to another, `senders` neighbours of each doing the same."""
        devices = self.cluster.devices_per_node
        if first // devices == second // devices:
            speed = self._intra(2) / self._crowded(senders)
            return self.intra_latency_s + size_bytes / self._reached(speed, size_bytes)
        crossing = min(senders, devices)
        node = self.cluster.inter_node_bandwidth_bytes_per_s * devices * self.inter_share
        speed = min(node / crossing, self._intra(2))
        return self.inter_latency_s + size_bytes / self._reached(speed, size_bytes)

    def _link(self, place: GroupPlace, size_bytes: float) -> tuple[float, float]:
        """Latency of a message and bandwidth of the group's slowest link."""
        devices = self.cluster.devices_per_node
        inner = place.in_node(devices)
        groups = max(devices // inner, 1)
        inside = self._intra(inner) / self._crowded(groups) if inner > 1 else math.inf
        num_nodes = place.size / inner
        if num_nodes <= 1:
            return self.intra_latency_s, self._reached(inside, size_bytes / place.size)
        out = self.cluster.inter_node_bandwidth_bytes_per_s * devices / groups
        out *= self.inter_share * (1 - self.congestion) ** math.log2(num_nodes)
        return self.inter_latency_s, self._reached(min(inside, out), size_bytes / place.size)

    def _intra(self, ranks: int) -> float:
        """Bandwidth inside a node by the number of ranks; between those described, the nearest."""
        table = self.cluster.intra_node_bandwidth_bytes_per_s
        if not table:
            return 10 * self.cluster.inter_node_bandwidth_bytes_per_s * self.intra_share
        nearest = min(table, key=lambda known: abs(math.log2(known / ranks)))
        return table[nearest] * self.intra_share

    def _crowded(self, groups: int) -> float:
        return float((1 + self.crowding) ** math.log2(max(groups, 1)))

    def _reached(self, speed: float, message_bytes: float) -> float:
        """A short message never gets a link to its full speed."""
        return speed * message_bytes / (message_bytes + self.half_speed_bytes)

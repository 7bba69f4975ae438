"""The simulated machine of one seed: device, links and allocator.

Matrix products are cut into tiles that the units of the device work on in waves, so that some
shapes leave units idle in the last wave (NVIDIA, "Matrix Multiplication Background", on tile and
wave quantisation). The closed-form estimates do not model this.

Ranks are placed as by the trainer: tp varies fastest, then dp, then pp. Groups of one kind
communicate at the same time and share the links of a node. The network gets slower with every
doubling of the nodes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from search_spaces.spec.cluster import Cluster
from search_spaces.units import GIB

TILE: Final = 128
_SPLIT_FROM: Final = 1024
"""A long inner dimension is split over idle units, in parts of at least this length."""

_DEFAULT_PEAK: Final = {"fp32": 20e12, "bf16": 300e12, "fp16": 300e12}
_BEST_HEAD: Final = 128.0
_STRAGGLERS: Final = 0.01
"""Share of devices that are noticeably slow (MegaScale, arXiv:2402.15627, found some 0.5 %)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPlace:
    """The placement of equally spaced groups of ranks."""

    size: int
    """Ranks of the group."""
    stride: int
    """Devices from one rank of the group to the next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """The real speed of the links."""

    cluster: Cluster
    intra_share: float
    """Real share of the described bandwidth inside a node."""
    inter_share: float
    """Real share of the described bandwidth between nodes."""
    congestion: float
    """Share of bandwidth that is lost with each doubling of the nodes."""
    crowding: float
    """Slowdown with each doubling of the number of groups in the same node."""
    intra_latency_s: float
    """Latency of a message inside a node."""
    inter_latency_s: float
    """Latency of a message between nodes."""
    half_speed_bytes: float
    """Message size at which a link reaches half of its bandwidth."""

    @classmethod
    def draw(cls, cluster: Cluster, rng: np.random.Generator) -> Self:
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
        inner = max(min(place.size, devices // place.stride), 1)  # ranks that share a node
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
        """Bandwidth for a message: short messages are slower."""
        return speed * message_bytes / (message_bytes + self.half_speed_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The real speed of one device."""

    peak_flops_per_s: Mapping[str, float]
    """Peak by precision, from the data sheet."""
    matmul_share: float
    """Share of the peak that the best matrix product reaches."""
    attention_share: float
    """Share of the peak that fused attention with heads of 128 reaches."""
    num_units: int
    """Tiles that are processed at once."""
    ramp: float
    """Length of the inner dimension at which a tile reaches half of its speed."""
    bytes_per_s: float
    """Memory bandwidth that a stream reaches."""
    launch_s: float
    """Seconds that the host takes to launch a kernel, and the shortest that one takes."""

    @classmethod
    def draw(cls, cluster: Cluster, rng: np.random.Generator) -> Self:
        return cls(
            peak_flops_per_s=dict(cluster.peak_flops_per_s) or _DEFAULT_PEAK,
            matmul_share=rng.uniform(0.5, 0.8),
            attention_share=rng.uniform(0.3, 0.55),
            num_units=int(rng.integers(104, 133)),
            ramp=rng.uniform(80, 320),
            bytes_per_s=cluster.memory_bandwidth_bytes_per_s * rng.uniform(0.7, 0.92),
            launch_s=rng.uniform(4e-6, 9e-6),
        )

    def matmul_s(self, rows: int, columns: int, inner: int, *, precision: str) -> float:
        """Seconds of a product of (rows, inner) and (inner, columns)."""
        tiles = math.ceil(rows / TILE) * math.ceil(columns / TILE)
        parts = max(min(self.num_units // tiles, inner // _SPLIT_FROM), 1)
        waves = math.ceil(tiles * parts / self.num_units)
        flops = 2.0 * waves * self.num_units * TILE * TILE * (inner / parts + self.ramp)
        compute_s = flops / (self.peak_flops_per_s[precision] * self.matmul_share)
        moved = rows * inner + inner * columns + rows * columns
        return max(compute_s, moved * element_bytes(precision) / self.bytes_per_s, self.launch_s)

    def attention_s(
        self, sequences: int, length: int, heads: int, head_size: int, *, precision: str
    ) -> float:
        """Seconds of fused causal attention, forward; too few heads leave units idle."""
        flops = 2.0 * sequences * heads * head_size * length * length
        blocks = sequences * heads * math.ceil(length / TILE)
        occupied = blocks / (math.ceil(blocks / self.num_units) * self.num_units)
        narrow = math.sqrt(min(head_size / _BEST_HEAD, 1.0))
        speed = self.peak_flops_per_s[precision] * self.attention_share * occupied * narrow
        return max(flops / speed, self.launch_s)

    def stream_s(self, moved_bytes: float) -> float:
        """Seconds to read and write so many bytes in one kernel."""
        return max(moved_bytes / self.bytes_per_s, self.launch_s)


def element_bytes(precision: str) -> int:
    """Bytes of an element in the precision of the products."""
    return 4 if precision == "fp32" else 2


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Machine:
    """The real properties of a cluster, which a search does not know."""

    device: Device
    network: Network
    slowness: NDArray[np.float64]
    """Time of each device of the job, relative to the fastest."""
    noise: float
    """Relative standard deviation of a measured step time."""
    overlaps_reduction: bool
    """Whether gradients are summed while the last backward passes run."""
    interference: float
    """How much longer a pass takes while gradients are summed beside it."""
    context_bytes: float
    """Memory that the driver takes of each device."""
    communicator_bytes: float
    """Memory that each group of ranks takes of each device."""
    fragmentation: float
    """Largest share of the activations that the allocator loses; it differs between layouts."""

    @classmethod
    def draw(cls, cluster: Cluster, num_devices: int, rng: np.random.Generator) -> Self:
        slowness = 1 + np.abs(rng.normal(0, 0.008, num_devices))
        is_straggler = rng.random(num_devices) < _STRAGGLERS
        return cls(
            device=Device.draw(cluster, rng),
            network=Network.draw(cluster, rng),
            slowness=np.where(is_straggler, slowness + rng.uniform(0.03, 0.1), slowness),
            noise=rng.uniform(0.01, 0.03),
            overlaps_reduction=bool(rng.random() < 0.7),
            interference=rng.uniform(0.02, 0.2),
            context_bytes=rng.uniform(0.6, 1.6) * GIB,
            communicator_bytes=rng.uniform(0.1, 0.4) * GIB,
            fragmentation=rng.uniform(0.03, 0.12),
        )

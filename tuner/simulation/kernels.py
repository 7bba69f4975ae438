"""What a simulated device takes for a matrix product, for attention, for moving bytes.

Products are cut into tiles that the device's units take in waves, so that an unlucky shape leaves
units idle in the last one (NVIDIA, "Matrix Multiplication Background", on tile and wave
quantisation). No closed form of the estimates has this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from search_spaces.cluster import Cluster

TILE: Final = 128
_SPLIT_FROM: Final = 1024
"""A long inner dimension is split over idle units, in parts of no less than this."""
_DEFAULT_PEAK: Final = {"fp32": 20e12, "bf16": 300e12, "fp16": 300e12}
_BEST_HEAD: Final = 128.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """How fast one device really is."""

    peak_flops_per_s: Mapping[str, float]
    """What the data sheet says, by precision."""
    matmul_share: float
    """Of the peak, that the best product reaches."""
    attention_share: float
    """Of the peak, that fused attention with heads of 128 reaches."""
    num_units: int
    """Tiles that are worked on at once."""
    ramp: float
    """Length of the inner dimension at which a tile reaches half of its speed."""
    bytes_per_s: float
    """Memory bandwidth that a stream reaches."""
    launch_s: float
    """Seconds that the host takes to launch a kernel, and the shortest that one takes."""

    @classmethod
    def draw(cls, cluster: Cluster, rng: np.random.Generator) -> Self:
        """A device of the cluster, as no data sheet describes it."""
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

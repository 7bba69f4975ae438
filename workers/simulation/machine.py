"""The simulated machine: its devices, network, host, software and allocator.

Matrix products are cut into tiles that the units of the device work on in waves, so that some
shapes leave units idle in the last wave (NVIDIA, "Matrix Multiplication Background", on tile and
wave quantisation). The closed-form estimates do not model this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np

from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.units import GIB
from layout_tuner.workers.simulation.collectives import Collectives
from layout_tuner.workers.simulation.fabrics import fabric

_TILES: Final = ((256, 128, 1.0), (128, 128, 0.93), (128, 64, 0.8), (64, 64, 0.65))
"""Rows and columns of the tiles that libraries choose among, and the speed of each."""
_SPLIT_FROM: Final = 1024
"""A long inner dimension is split over idle units, in parts of at least this length."""
_BEST_HEAD: Final = 128.0
_DEFAULT_PEAK: Final = {"fp32": 20e12, "bf16": 300e12, "fp16": 300e12}


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device."""

    peak_flops_per_s: Mapping[str, float]
    """Peak by precision, from the data sheet."""
    matmul_share: float
    """Share of the peak that the largest matrix products reach."""
    attention_share: float
    """Share of the peak that fused attention with heads of 128 reaches."""
    num_units: int
    """Tiles that are processed at once."""
    ramp: float
    """Length of the inner dimension at which a tile reaches half of its speed."""
    bytes_per_s: float
    """Memory bandwidth that a stream reaches."""
    kernel_s: float
    """Seconds that the shortest kernel takes."""

    def matmul_s(
        self, rows: float, columns: float, inner: float, precision: str, count: float = 1.0
    ) -> float:
        """Seconds of some products of (rows, inner) and (inner, columns) in one kernel."""
        if rows <= 0:
            return 0.0
        peak = self.peak_flops_per_s.get(precision) or max(self.peak_flops_per_s.values())
        units, best = self.num_units, math.inf
        for tall, wide, speed in _TILES:
            tiles = math.ceil(rows / tall) * math.ceil(columns / wide) * count
            parts = max(min(units // tiles, inner // _SPLIT_FROM), 1)
            waves = math.ceil(tiles * parts / units)
            best = min(best, waves * tall * wide * (inner / parts + self.ramp) / speed)
        compute_s = 2.0 * units * best / (peak * self.matmul_share)
        moved = count * (rows * inner + inner * columns + rows * columns)
        return max(compute_s, moved * element_bytes(precision) / self.bytes_per_s, self.kernel_s)

    def attention_s(self, blocks: float, flops: float, head_size: int, precision: str) -> float:
        """Seconds of fused attention, forward; too few blocks of queries leave units idle."""
        occupied = blocks / (math.ceil(blocks / self.num_units) * self.num_units)
        narrow = math.sqrt(min(head_size / _BEST_HEAD, 1.0))
        speed = self.peak_flops_per_s.get(precision, 0) or max(self.peak_flops_per_s.values())
        return max(flops / (speed * self.attention_share * occupied * narrow), self.kernel_s)

    def stream_s(self, moved_bytes: float, kernels: int = 1) -> float:
        """Seconds to read and write so many bytes in some kernels."""
        return max(moved_bytes / self.bytes_per_s, kernels * self.kernel_s)


def element_bytes(precision: str) -> int:
    """Bytes of an element of weights and activations."""
    return 4 if precision == "fp32" else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Where trainers differ."""

    fused_attention: bool = True
    elementwise: float = 1.0
    """Memory traffic of what is not a matrix product, over that of the embedded trainer."""
    host_operations: float = 1.0
    """Operations that the host launches, likewise."""
    overlaps_reduction: bool = True
    """Whether gradients are summed while the last backward passes run."""
    overlaps_shards: bool = True
    """The same of ZeRO-1, for which it is an option in some trainers."""
    splits_by_work: bool = False
    """Whether the split over stages counts the output projection by its work, as nanotron does; of
    layers that do not divide, the first stages have one more otherwise."""
    step_s: float = 1e-2
    """Seconds of a step that are equal for all layouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A cluster as it really is, which a search does not know."""

    cluster: Cluster
    device: Device
    collectives: Collectives
    software: Software = Software()
    host_s: float
    """Host time of one operation."""
    host_collective_s: float
    """Host time of one collective, with its waiting and copies."""
    host_crowding: float = 0.0
    """How much slower hosts are, a rank of tp, where pipelines cross nodes: proxies of the network
    take cores from them, and tensor-parallel ranks wait for the slowest host."""
    interference: float = 0.08
    """How much longer two things take that share a device's memory, beside each other."""
    noise: float = 0.015
    """Relative standard deviation of a measured step time."""
    context_bytes: float = 1.0 * GIB
    """Memory that the driver takes of each device."""
    communicator_bytes: float = 0.25 * GIB
    """Memory that each group of ranks takes of each device."""
    fragmentation: float = 0.12
    """Largest share of the activations that the allocator loses; it differs between layouts."""

    @classmethod
    def of(cls, cluster: Cluster, software: Software = Software(), **changes: float) -> Self:
        """The machine of a cluster: constants of its family of devices and of its name.

        Args:
            cluster: the cluster.
            software: what trains.
            changes: other values of `constants`.
        """
        values = {**cls.constants(cluster), **changes}
        device = Device(
            peak_flops_per_s=dict(cluster.peak_flops_per_s) or _DEFAULT_PEAK,
            num_units=round(values["num_units"]),
            bytes_per_s=cluster.memory_bandwidth_bytes_per_s * values["stream_share"],
            **{
                name: values[name]
                for name in ("matmul_share", "attention_share", "ramp", "kernel_s")
            },
        )
        network = fabric(cluster, far_share=values["far_share"], near_share=values["near_share"])
        return cls(
            cluster=cluster,
            device=device,
            collectives=Collectives(fabric=network),
            software=software,
            host_s=cluster.host_operation_s * values["host_share"],
            host_collective_s=cluster.host_operation_s * values["host_collective"],
            host_crowding=values["host_crowding"],
        )

    @staticmethod
    def constants(cluster: Cluster) -> dict[str, float]:
        family = next(of for word, of in _FAMILIES if word in cluster.device)
        return {**_USUAL, **family, **_FITTED.get(cluster.name, {})}

    def beside_s(self, message_s: float, compute_s: float) -> float:
        """Seconds that a message adds to the compute beside it."""
        shared = self.interference * min(message_s, compute_s)
        return max(message_s - compute_s, 0.0) + shared

    def drawn(self, rng: np.random.Generator) -> Self:
        """A machine of the same kind that is a little better here and worse there."""
        return self._scaled(lambda: rng.uniform(0.8, 1.25), rng)

    def stressed(self, rng: np.random.Generator) -> Self:
        """A machine on which every constant is `STRESS` off, up or down."""
        return self._scaled(lambda: 1 + rng.uniform(*STRESS) * rng.choice([-1.0, 1.0]), rng)

    def _scaled(self, factor: Any, rng: np.random.Generator) -> Self:
        device = replace(
            self.device,
            matmul_share=min(self.device.matmul_share * factor(), 0.97),
            attention_share=min(self.device.attention_share * factor(), 0.97),
            num_units=round(self.device.num_units * rng.uniform(0.9, 1.1)),
            ramp=self.device.ramp * factor(),
            bytes_per_s=self.device.bytes_per_s * factor(),
            kernel_s=self.device.kernel_s * factor(),
        )
        collectives = replace(
            self.collectives, speed=factor(), near_speed=factor(), slowdown=factor()
        )
        software = replace(
            self.software,
            elementwise=self.software.elementwise * factor(),
            overlaps_reduction=bool(rng.random() < 0.7),
        )
        return replace(
            self,
            device=device,
            collectives=collectives,
            software=software,
            host_s=self.host_s * factor(),
            host_collective_s=self.host_collective_s * factor(),
            interference=self.interference * factor(),
            noise=rng.uniform(0.01, 0.03),
            context_bytes=self.context_bytes * factor(),
            communicator_bytes=self.communicator_bytes * factor(),
            fragmentation=rng.uniform(0.05, 0.2),
        )


def node_slowness(num_nodes: int, rng: np.random.Generator) -> list[float]:
    """Time of each node's slowest device, relative to a usual one.

    One node in a hundred is noticeably slow (MegaScale, arXiv:2402.15627, found some 0.5 % of
    machines).
    """
    slow = 1 + np.abs(rng.normal(0, 0.004, num_nodes))
    is_straggler = rng.random(num_nodes) < _STRAGGLERS
    found: list[float] = (slow + is_straggler * rng.uniform(0.03, 0.15, num_nodes)).tolist()
    return found


_STRAGGLERS: Final = 0.01

STRESS: Final = (0.4, 0.6)
"""Relative error of each constant of a stressed machine."""

_USUAL: Final[Mapping[str, float]] = {
    "stream_share": 0.8,
    "kernel_s": 4e-6,
    "ramp": 160.0,
    "host_share": 1.0,
    "host_collective": 10.0,
    "host_crowding": 0.0,
    "far_share": 1.0,
    "near_share": 1.0,
}

_FAMILIES: Final[tuple[tuple[str, Mapping[str, float]], ...]] = (
    # Units and the speed of a large product: AxoNN's authors measured 125 of 191.5 TFLOP/s on a
    # GCD, 280 of 312 on an A100, 813 of 989 on a GH200 (arXiv:2502.08145).
    # Attention: 50 to 73 % of an A100's peak forward (arXiv:2307.08691), some 40 % of an
    # H100's with the same kernels.
    ("MI250X", {"num_units": 110, "matmul_share": 0.65, "attention_share": 0.3}),
    ("MI300X", {"num_units": 304, "matmul_share": 0.6, "attention_share": 0.3}),
    ("A100", {"num_units": 108, "matmul_share": 0.9, "attention_share": 0.55}),
    ("H100", {"num_units": 132, "matmul_share": 0.8, "attention_share": 0.4}),
    ("H200", {"num_units": 132, "matmul_share": 0.8, "attention_share": 0.4}),
    ("B200", {"num_units": 148, "matmul_share": 0.8, "attention_share": 0.4}),
    ("B300", {"num_units": 148, "matmul_share": 0.8, "attention_share": 0.4}),
    ("CPU", {"num_units": 1, "matmul_share": 0.75, "attention_share": 0.4, "ramp": 30.0}),
    ("", {"num_units": 120, "matmul_share": 0.7, "attention_share": 0.4}),
)
"""Constants by a word in the device's description."""

_FITTED: Final[Mapping[str, Mapping[str, float]]] = {
    # 69.2 TFLOP/s of 175B with tp 4, pp 16, dp 2 and 640 micro-batches (arXiv:2312.12705).
    "frontier": {"matmul_share": 0.4568},
    # Llama 3B on 16 devices of the Ultra-Scale Playbook's sweep with nanotron.
    "h100-sxm": {
        "matmul_share": 0.543,
        "attention_share": 0.276,
        "ramp": 171.0,
        "far_share": 0.954,
        "near_share": 0.897,
    },
    # GPT of 24 layers and hidden 2048 on 4 devices, vTrain's ground truth.
    "a100-sxm": {
        "matmul_share": 0.868,
        "attention_share": 0.536,
        "stream_share": 0.435,
        "ramp": 173.0,
        "near_share": 0.939,
    },
}
"""Constants by cluster that `python -m benchmarks.bench_simulator --refit` finds."""

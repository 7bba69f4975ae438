"""The simulated machine: device, links, allocator and luck of one seed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from search_spaces.cluster import GIB, Cluster
from tuner.simulation.kernels import Device
from tuner.simulation.network import Network

_STRAGGLERS: Final = 0.01
"""Share of devices that are noticeably slow (MegaScale, arXiv:2402.15627, found some 0.5 %)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Machine:
    """What the cluster really is, which nobody who searches is told."""

    device: Device
    """One device."""
    network: Network
    """The links."""
    slowness: NDArray[np.float64]
    """How many times longer each device of the job takes than the best."""
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
    """Share of the activations that the allocator loses, at most; layouts differ in it."""

    @classmethod
    def draw(cls, cluster: Cluster, num_devices: int, rng: np.random.Generator) -> Self:
        """A machine as described, as far as descriptions go."""
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

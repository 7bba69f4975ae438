"""Settings of a simulated worker: its machine, seed and speed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationOptions:
    """What is simulated, and how fast."""

    cluster: str
    """Name or file of the cluster."""
    workers: int = 1
    """Workers of the process, each with nodes of its own."""
    time_scale: float = 0.0
    """Real seconds that a simulated second takes; 0: as few as possible."""
    seed: int = 0
    """Seed of the nodes: which are slow, and which fail when."""

    @property
    def arguments(self) -> Iterator[str]:
        """The same as arguments of `layout-tuner worker`."""
        yield from ("--simulate", self.cluster, "--workers", str(self.workers))
        yield from ("--time-scale", str(self.time_scale), "--seed", str(self.seed))

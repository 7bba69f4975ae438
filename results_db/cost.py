"""What a probe cost, in node-seconds, by what they were spent on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Node-seconds by what they were spent on; no part is under 0."""

    iterations: float = 0.0
    """Devices in iterations, warm-up included."""
    start: float = 0.0
    """The rest of the time of probes whose outcome counts: starting, building, ending."""
    idle: float = 0.0
    """Devices that were held and not used: a layout smaller than its nodes; of a campaign also its
    share of what its cluster's allocations held for no probe."""
    lost: float = 0.0
    """Attempts that taught nothing: lost, given back, or too late."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.iterations + self.start + self.idle + self.lost

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            iterations=self.iterations + other.iterations,
            start=self.start + other.start,
            idle=self.idle + other.idle,
            lost=self.lost + other.lost,
        )

    @classmethod
    def of_loss(cls, *, held_s: float, nodes: float) -> Self:
        """The cost of an attempt that taught nothing."""
        return cls(lost=held_s * nodes)

    @classmethod
    def of_probe(
        cls, *, held_s: float, nodes: float, used_nodes: float, iterations_s: float
    ) -> Self:
        """The cost of an attempt whose outcome counts.

        Args:
            held_s: seconds that it held its nodes.
            nodes: how many, a part of one included.
            used_nodes: its ranks' devices, counted in nodes.
            iterations_s: seconds of its iterations; no more than it held its nodes count.
        """
        used = min(used_nodes, nodes)
        iterating_s = min(iterations_s, held_s)
        return cls(
            iterations=iterating_s * used,
            start=(held_s - iterating_s) * used,
            idle=held_s * (nodes - used),
        )

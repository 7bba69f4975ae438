"""What disturbs the probes of `slow-probe`, `slow-node` and `frontier-175b`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layout_tuner.search_spaces.tables import TableRow
from layout_tuner.tuner.replay.run import ProbeConditions


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowProbes:
    """Some probes are slower, whatever their layout: a `Disturbance` of a replay."""

    share: float = 0.15
    """Of the probes that are slower."""
    slowdown: float = 1.5
    """Their step time over the true one."""
    draw: int = 0
    """Searches of one seed with different draws meet different slow probes."""

    def __call__(self, _row: TableRow, seed: int, number: int) -> ProbeConditions:
        """Draws by seed and number of the probe, not by its layout."""
        is_slow = np.random.default_rng([self.draw, seed, number]).random() < self.share
        return ProbeConditions(slowdown=self.slowdown if is_slow else 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowNode:
    """One node of the machine is slow; a probe waits for the slowest of its nodes."""

    num_nodes: int = 8
    """Nodes of the machine; a probe runs on as many of them as its layout needs, at random."""
    slowdown: float = 1.5
    """Step time on the slow node over that on the others."""
    draw: int = 0
    """Searches of one seed with different draws use different nodes."""

    def __call__(self, row: TableRow, seed: int, number: int) -> ProbeConditions:
        """Draws the nodes by seed and number of the probe; which one is slow, by the seed."""
        slow = int(np.random.default_rng([self.draw, seed]).integers(self.num_nodes))
        rng = np.random.default_rng([self.draw, seed, number])
        used = sorted(rng.choice(self.num_nodes, row.layout.num_nodes, replace=False).tolist())
        return ProbeConditions(
            slowdown=self.slowdown if slow in used else 1.0,
            nodes=tuple(f"node-{node}" for node in used),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisyProbes:
    """Every probe's step time is off by a normally distributed share: a `Disturbance`."""

    noise: float = 0.02
    """Standard deviation of the logarithm of the step time."""

    def __call__(self, _row: TableRow, seed: int, number: int) -> ProbeConditions:
        """Draws by seed and number of the probe."""
        off = np.random.default_rng([seed, number]).standard_normal()
        return ProbeConditions(slowdown=float(np.exp(self.noise * off)))

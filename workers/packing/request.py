"""What is asked of a packer, and what it answers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from workers.packing.shares import Share


@dataclass(frozen=True, kw_only=True, slots=True)
class PackRequest:
    """A probe that waits for devices."""

    key: Hashable
    """Names it: the trial's id."""
    num_nodes: int
    """Nodes that it occupies; more than one are held whole."""
    num_devices: int
    """Devices over all of them."""
    at_most_s: float
    """Seconds after its start by which its devices are free again, whatever happens: the probe's
    deadline and what its end may take."""
    expected_s: float | None = None
    """Seconds that it will probably take; None: as long as it may."""
    avoid: frozenset[int] = frozenset()
    """Positions of nodes that it must not get: where it failed before."""

    def __post_init__(self) -> None:
        if self.num_nodes < 1:
            raise ValueError(f"num_nodes={self.num_nodes} is not positive")
        if not (self.num_nodes - 1) * self.per_node < self.num_devices:
            raise ValueError(
                f"num_devices={self.num_devices} do not fill num_nodes={self.num_nodes}"
            )
        if not self.at_most_s > 0:
            raise ValueError(f"at_most_s={self.at_most_s} is not positive")

    @property
    def per_node(self) -> int:
        """Devices on each node but the last, which may have fewer."""
        return -(-self.num_devices // self.num_nodes)

    def shares_of_nodes(self, nodes: tuple[int, ...]) -> tuple[Share, ...]:
        """The devices at the front of these nodes, as many as it needs."""
        left = self.num_devices
        shares = []
        for node in nodes:
            shares.append(Share.of_first(node, min(left, self.per_node)))
            left -= self.per_node
        return tuple(shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What is left for a probe that would start at once and delay none that waits."""

    nodes: int
    """Whole nodes."""
    devices: int
    """Contiguous devices of one node, which may be a whole one."""
    longest_s: float | None
    """Seconds that it may take; None: any time."""

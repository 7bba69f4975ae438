"""The devices of an allocation that a probe holds, requests to the packer, and its free room."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Devices of one node that a probe holds."""

    node: int
    """Position of the node in the allocation; positions are stable, nodes are only ever
    appended."""
    devices: tuple[int, ...]
    """Their indices on the node: contiguous, ascending."""

    def __post_init__(self) -> None:
        if self.node < 0:
            raise ValueError(f"node={self.node} is no position of a node")
        first = self.devices[0] if self.devices else -1
        if first < 0 or self.devices != tuple(range(first, first + len(self.devices))):
            raise ValueError(
                f"devices={self.devices} of a share are not contiguous, ascending indices"
            )

    @classmethod
    def of_first(cls, node: int, num_devices: int) -> Self:
        return cls(node=node, devices=tuple(range(num_devices)))


Placement = tuple[Share, ...]
"""All shares of a probe. Its ranks fill one share after the other with n ranks each (fewer in the
last, where they do not divide): rank r has device r % n of share r // n."""


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
    """Seconds after its start by which its devices are free again in every case: the probe's
    deadline and the time to end it."""
    expected_s: float | None = None
    """Expected duration in seconds; None: `at_most_s`."""
    avoid: frozenset[int] = frozenset()
    """Positions of nodes that it must not get, since it failed there before."""

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
        """The first devices of these nodes, as many as it needs."""
        left = range(self.num_devices, 0, -self.per_node)
        return tuple(
            Share.of_first(node, min(on_node, self.per_node))
            for node, on_node in zip(nodes, left, strict=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The largest probe that could start at once without delaying a waiting one."""

    nodes: int
    devices: int
    """Contiguous devices of one node, which may be a whole one."""
    longest_s: float | None
    """Seconds that it may take; None: no limit."""

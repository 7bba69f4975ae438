"""What a probe holds of an allocation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """Devices of one node that a probe holds."""

    node: int
    """Position of the node in the allocation; positions are stable, nodes are only ever appended."""
    devices: tuple[int, ...]
    """Their indices on the node: contiguous, ascending."""

    def __post_init__(self) -> None:
        if self.node < 0:
            raise ValueError(f"node={self.node} is no position of a node")
        first = self.devices[0] if self.devices else 0
        if not self.devices or first < 0 or self.devices != _run(first, len(self.devices)):
            raise ValueError(
                f"devices={self.devices} of a share are not contiguous, ascending indices"
            )

    @classmethod
    def of_first(cls, node: int, num_devices: int) -> Share:
        """The devices at the front of a node."""
        return cls(node=node, devices=_run(0, num_devices))


Placement = tuple[Share, ...]
"""All that a probe holds. Its ranks fill share by share, as many in each as in the first (fewer in
the last, where they do not divide): rank r has device r % n of share r // n."""


def _run(first: int, length: int) -> tuple[int, ...]:
    return tuple(range(first, first + length))

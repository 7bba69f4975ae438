"""The devices of an allocation, by node: until when each is held."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from workers.packing.choice import NEVER, Bools, Floats, Ints
from workers.packing.shares import Share

_FREE: Final = -np.inf
"""The time until which a free device is held."""


class DeviceTable:
    """Until when each device of each node is held, and which nodes are usable."""

    def __init__(self) -> None:
        self.num_devices: Ints = np.zeros(0, dtype=np.intp)
        self.largest = 0
        """Devices of the largest node."""
        self.usable: Bools = np.zeros(0, dtype=np.bool_)
        self._exists: Bools = np.zeros((0, 0), dtype=np.bool_)
        self._until: Floats = np.full((0, 0), _FREE)
        self._expected: Floats = np.full((0, 0), _FREE)

    def add_node(self, num_devices: int) -> int:
        """Appends a node, and returns its position."""
        node = len(self.num_devices)
        self.num_devices = np.append(self.num_devices, num_devices)
        self.usable = np.append(self.usable, True)
        self.largest = max(self.largest, num_devices)
        shape = (node + 1, self.largest)
        self._exists = np.arange(self.largest) < self.num_devices[:, None]
        self._until = _grown(self._until, shape)
        self._expected = _grown(self._expected, shape)
        return node

    def hold(self, held: Iterable[Share], *, until: float, expected_until: float) -> None:
        """Devices are held until then at the latest."""
        for share in held:
            devices = slice(share.devices[0], share.devices[-1] + 1)
            self._until[share.node, devices] = until
            self._expected[share.node, devices] = expected_until

    def release(self, held: Iterable[Share]) -> None:
        """Devices are free again."""
        self.hold(held, until=_FREE, expected_until=_FREE)

    def free(self) -> Bools:
        """Which devices are free and usable."""
        free: Bools = self._exists & self.usable[:, None] & (self._until == _FREE)
        return free

    def whole(self, free: Bools) -> Bools:
        """Which nodes have all of their devices among these."""
        whole: Bools = (free == self._exists).all(axis=1)
        return whole

    def free_at(self, now_s: float, *, expected: bool = False) -> Floats:
        """When each device gets free, at the latest or as expected; what is overdue does so now."""
        until = self._expected if expected else self._until
        late = np.where(until == _FREE, _FREE, np.maximum(until, now_s))
        return np.where(self._exists & self.usable[:, None], late, NEVER)

    def node_free_at(self, free_at: Floats) -> Floats:
        """When all devices of each node are free."""
        latest: Floats = np.where(self._exists, free_at, _FREE).max(axis=1, initial=_FREE)
        return np.where(self.usable, latest, NEVER)


def _grown(old: Floats, shape: tuple[int, int]) -> Floats:
    new = np.full(shape, _FREE)
    new[: old.shape[0], : old.shape[1]] = old
    return new

"""The free devices of one moment, while probes are given some of them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from workers.packing.choice import Bools, choose_devices, choose_nodes, longest_gap
from workers.packing.devices import DeviceTable
from workers.packing.request import PackRequest
from workers.packing.shares import Placement, Share


class FreeDevices:
    """What may be given out; knows at once what is too large for it.

    Args:
        table: of all devices.
        free: those that may be given out.
    """

    def __init__(self, table: DeviceTable, free: Bools) -> None:
        self._table = table
        self._free = free
        self._longest: int | None = None
        self._count()

    def without(self, reserved: Bools) -> FreeDevices:
        """Those that are not reserved."""
        return FreeDevices(self._table, self._free & ~reserved)

    def choose(self, request: PackRequest, *, whole: bool) -> Placement | None:
        """Devices for a probe, None when it does not fit: all or nothing.

        Args:
            request: the probe.
            whole: whether it gets whole nodes.
        """
        if whole:
            if request.num_nodes > self.num_whole:
                return None
            fits = self._whole & (self._table.num_devices >= request.per_node)
            fits[list(request.avoid)] = False
            nodes = choose_nodes(fits, request.num_nodes)
            return None if nodes is None else request.shares_of_nodes(nodes)
        if request.num_devices > self.longest:
            return None
        free = self._free
        if request.avoid:
            free = free.copy()
            free[list(request.avoid)] = False
        share = choose_devices(free, request.num_devices)
        return None if share is None else (share,)

    def take(self, held: Iterable[Share]) -> None:
        """Devices are given out."""
        for share in held:
            self._free[share.node, share.devices[0] : share.devices[-1] + 1] = False
        self._count()

    @property
    def longest(self) -> int:
        """The most contiguous devices of a node."""
        if self._longest is None:
            self._longest = longest_gap(self._free)
        return self._longest

    def _count(self) -> None:
        self._whole = self._table.whole(self._free)
        self.num_whole = int(np.count_nonzero(self._whole))
        """Whole nodes among them."""
        self._longest = None

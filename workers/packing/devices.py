"""The devices of an allocation, by node: until when each is held, and which to choose for a probe.

Arrays are over the nodes, and over the devices of a node where they are two-dimensional.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import combinations
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from layout_tuner.array_types import Bools, Floats
from layout_tuner.workers.packing.request import PackRequest, Placement, Share

Ints = NDArray[np.intp]

_T = TypeVar("_T", bound=np.generic)

NEVER: Final = np.inf
"""The time at which unusable devices get free."""

_FREE: Final = -np.inf
"""The time until which a free device is held."""

_MOST_SETS: Final = 512
"""Sets of groups that are compared before the largest groups are taken."""


def choose_nodes(free: Bools, count: int, levels: Ints | None = None) -> tuple[int, ...] | None:
    """Chooses `count` of the free nodes; None where there are too few.

    They come from as few groups as the free nodes force: of the largest level first, since its
    links are the slowest, then of the next one within these. Of equal choices the one with the
    fewest free nodes is taken, so that whole groups remain for larger probes. Within a group, or
    without levels, the same holds for runs of neighbours, which usually share a switch. Groups of
    the smallest level get equal numbers where they can, as estimates assume, and the nodes of a
    group stand together: ranks are contiguous.

    Args:
        free: by node.
        count: nodes that are needed.
        levels: number of the group of each node, by level (smallest first) and node; None: there
            are no levels.
    """
    positions = np.flatnonzero(free)
    if len(positions) < count:
        return None
    if levels is None or not len(levels):
        return tuple(_neighbours(positions, count).tolist())
    for level in range(len(levels) - 1, -1, -1):
        positions = _in_fewest_groups(positions, levels[: level + 1], count)
    leaves = [positions[levels[0][positions] == group] for group in set(levels[0][positions])]
    parts, left = [], count
    for place, leaf in enumerate(sorted(leaves, key=len)):
        share = min(len(leaf), left // (len(leaves) - place))
        parts.append(_neighbours(leaf, share))
        left -= share
    chosen = np.sort(np.concatenate(parts))
    order = [chosen]
    for level in levels:
        _, first, group = np.unique(level[chosen], return_index=True, return_inverse=True)
        order.append(first[group])
    return tuple(chosen[np.lexsort(order)].tolist())


def _tightest(groups: Ints, count: int) -> tuple[int, int]:
    """How many groups `count` nodes take at least, and the free nodes of such groups.

    Args:
        groups: the group of each free node.
        count: nodes that are needed.
    """
    sizes = np.sort(np.unique(groups, return_counts=True)[1])[::-1]
    fewest = int(np.searchsorted(np.cumsum(sizes), count)) + 1
    others = int(sizes[: fewest - 1].sum())
    return fewest, others + int(sizes[sizes >= count - others].min())


def _in_fewest_groups(positions: Ints, levels: Ints, count: int) -> Ints:
    """The nodes of the fewest groups of the last level that together have enough.

    Among those, of the groups in which the lower levels need the fewest, then of those with the
    fewest nodes, the smallest level first.
    """
    names, group, sizes = np.unique(levels[-1][positions], return_inverse=True, return_counts=True)
    fewest, _ = _tightest(group, count)
    if math.comb(len(names), fewest) <= _MOST_SETS:
        sets: Iterable[tuple[int, ...]] = combinations(range(len(names)), fewest)
    else:  # the largest ones, and the smallest that completes them
        largest = np.argsort(-sizes, kind="stable")[: fewest - 1].tolist()
        sets = [(*largest, other) for other in range(len(names)) if other not in largest]

    def cost(chosen: tuple[int, ...]) -> tuple[int, ...]:
        within = positions[np.isin(group, chosen)]
        below = [_tightest(level[within], count) for level in levels[:-1]]
        return (*(num for num, _ in below[::-1]), *(nodes for _, nodes in below), len(within))

    large_enough = (each for each in sets if sizes[list(each)].sum() >= count)
    return positions[np.isin(group, min(large_enough, key=cost))]


def _neighbours(positions: Ints, count: int) -> Ints:
    """`count` nodes of the smallest run of neighbours that has enough, or of the longest runs."""
    runs = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    large_enough = [run for run in runs if len(run) >= count]
    if large_enough:
        return min(large_enough, key=len)[:count]
    return np.sort(np.concatenate(sorted(runs, key=len, reverse=True))[:count])


def choose_devices(free: Bools, width: int) -> Share | None:
    """Chooses `width` contiguous free devices of one node; None where no node has them.

    They are aligned to their number where possible, since the devices of a package are nearer to
    each other; then they come from the node with the fewest free devices, and there from the
    smallest gap, so that large gaps and whole nodes remain for larger probes.
    """
    if width > free.shape[1]:
        return None
    node, start = np.nonzero(_windows(free, width).all(axis=2))
    if not len(node):
        return None
    num_free = np.count_nonzero(free, axis=1)[node]
    gap = _gaps(free)[node, start]
    best = np.lexsort((start, node, gap, num_free, misalignment(start, width)))[0]
    return _share(node[best], start[best], width)


def earliest_nodes(free_at: Floats, count: int) -> tuple[float, tuple[int, ...]] | None:
    """When `count` nodes are free, and which; None: never.

    Where more are free by then, those that get free last are chosen: the others can be used before.
    """
    if count > len(free_at):
        return None
    order = np.argsort(free_at, kind="stable")
    at = float(free_at[order[count - 1]])
    if at == NEVER:
        return None
    num_free = int(np.searchsorted(free_at[order], at, side="right"))
    return at, tuple(sorted(order[num_free - count : num_free].tolist()))


def earliest_devices(free_at: Floats, width: int) -> tuple[float, Share] | None:
    """When `width` contiguous devices of one node are free, and which; None: never."""
    if width > free_at.shape[1]:
        return None
    run_free_at = _windows(free_at, width).max(axis=2)
    at = float(run_free_at.min(initial=NEVER))
    if at == NEVER:
        return None
    node, start = np.nonzero(run_free_at == at)
    best = np.argmin(misalignment(start, width))
    return at, _share(node[best], start[best], width)


def misalignment(start: Ints, width: int) -> Ints:
    """Distance of a run's first device from a multiple of the smallest power of two >= `width`."""
    return start % (1 << (width - 1).bit_length())


def _windows(of: NDArray[_T], width: int) -> NDArray[_T]:
    return np.lib.stride_tricks.sliding_window_view(of, width, axis=1)


def _gaps(free: Bools) -> Ints:
    """The length of the gap of each free device; 0 for devices that are not free."""
    gaps: Ints = np.maximum(_runs(free) + _runs(free[:, ::-1])[:, ::-1] - 1, 0)
    return gaps


def _runs(free: Bools) -> Ints:
    """How many free devices in a row end with each device."""
    runs = np.zeros((len(free), 1 + free.shape[1]), dtype=np.intp)
    for device in range(free.shape[1]):
        runs[:, device + 1] = np.where(free[:, device], runs[:, device] + 1, 0)
    return runs[:, 1:]


def _share(node: np.intp, start: np.intp, width: int) -> Share:
    first = int(start)
    return Share(node=int(node), devices=tuple(range(first, first + width)))


class DeviceTable:
    """Until when each device of each node is held, and which nodes are usable."""

    def __init__(self) -> None:
        self.num_devices: Ints = np.zeros(0, dtype=np.intp)
        self.largest = 0
        """Devices of the largest node."""
        self.usable: Bools = np.zeros(0, dtype=np.bool_)
        self.levels: Ints = np.zeros((0, 0), dtype=np.intp)
        """The number of each node's group, by level (smallest first) and node."""
        self._exists: Bools = np.zeros((0, 0), dtype=np.bool_)
        self._until: Floats = np.full((0, 0), _FREE)
        self._expected: Floats = np.full((0, 0), _FREE)

    def add_node(self, num_devices: int) -> int:
        """Appends a node, and returns its position."""
        node = len(self.num_devices)
        self.levels = np.pad(self.levels, ((0, 0), (0, 1)), constant_values=-1)
        self.num_devices = np.append(self.num_devices, num_devices)
        self.usable = np.append(self.usable, True)
        self.largest = max(self.largest, num_devices)
        self._exists = np.arange(self.largest) < self.num_devices[:, None]
        added = ((0, 1), (0, self.largest - self._until.shape[1]))
        self._until, self._expected = (
            np.pad(times, added, constant_values=_FREE) for times in (self._until, self._expected)
        )
        return node

    def hold(self, held: Iterable[Share], *, until: float, expected_until: float) -> None:
        """Notes that devices are held until then at the latest."""
        for share in held:
            devices = slice(share.devices[0], share.devices[-1] + 1)
            self._until[share.node, devices] = until
            self._expected[share.node, devices] = expected_until

    def release(self, held: Iterable[Share]) -> None:
        self.hold(held, until=_FREE, expected_until=_FREE)

    def free(self) -> Bools:
        free: Bools = self._exists & self.usable[:, None] & (self._until == _FREE)
        return free

    def whole(self, free: Bools) -> Bools:
        """Which nodes have all of their devices among these."""
        whole: Bools = (free == self._exists).all(axis=1)
        return whole

    def free_at(self, now_s: float, *, expected: bool = False) -> Floats:
        """When each device gets free, at the latest or as expected; now where it is overdue."""
        until = self._expected if expected else self._until
        late = np.where(until == _FREE, _FREE, np.maximum(until, now_s))
        return np.where(self._exists & self.usable[:, None], late, NEVER)

    def node_free_at(self, free_at: Floats) -> Floats:
        """When all devices of each node are free."""
        latest: Floats = np.where(self._exists, free_at, _FREE).max(axis=1, initial=_FREE)
        return np.where(self.usable, latest, NEVER)


class FreeDevices:
    """The devices that may be assigned at one moment; refuses too large requests quickly."""

    def __init__(self, table: DeviceTable, free: Bools) -> None:
        self._table = table
        self._free = free
        self._longest: int | None = None
        self._count()

    def without(self, reserved: Bools) -> FreeDevices:
        return FreeDevices(self._table, self._free & ~reserved)

    def choose(self, request: PackRequest, *, whole: bool) -> Placement | None:
        """Chooses devices for a probe; None where it does not fit."""
        if whole:
            if request.num_nodes > self.num_whole:
                return None
            fits = self._whole & (self._table.num_devices >= request.per_node)
            fits[list(request.avoid)] = False
            nodes = choose_nodes(fits, request.num_nodes, self._table.levels)
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
        for share in held:
            self._free[share.node, share.devices[0] : share.devices[-1] + 1] = False
        self._count()

    @property
    def longest(self) -> int:
        """The largest number of contiguous devices of a node."""
        if self._longest is None:
            self._longest = int(_gaps(self._free).max(initial=0))
        return self._longest

    def _count(self) -> None:
        self._whole = self._table.whole(self._free)
        self.num_whole = int(np.count_nonzero(self._whole))
        """Whole nodes among them."""
        self._longest = None

"""Which nodes or devices to take of those that are free, or will be.

Arrays are over the nodes, and over the devices of a node where they are two-dimensional.
"""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from workers.packing.shares import Share

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

_T = TypeVar("_T", bound=np.generic)

NEVER: Final = np.inf
"""The time at which devices get free that can't be used."""


def choose_nodes(free: Bools, count: int) -> tuple[int, ...] | None:
    """So many of the free nodes, None when they are too few.

    Neighbours share a switch, so they are the smallest run of neighbours that is large enough, which
    leaves the larger runs to larger probes; without such a run, as few runs as possible.
    """
    positions = np.flatnonzero(free)
    if len(positions) < count:
        return None
    starts = np.flatnonzero(np.diff(positions, prepend=-2) > 1)
    lengths = np.diff(starts, append=len(positions))
    large_enough = lengths >= count
    if large_enough.any():
        start = starts[np.argmin(np.where(large_enough, lengths, len(positions) + 1))]
        return tuple(positions[start : start + count].tolist())
    chosen: list[int] = []
    for run in np.argsort(-lengths, kind="stable"):
        chosen += positions[starts[run] : starts[run] + lengths[run]].tolist()
        if len(chosen) >= count:
            break
    return tuple(sorted(chosen[:count]))


def choose_devices(free: Bools, width: int) -> Share | None:
    """So many contiguous free devices of one node, None when no node has them.

    They are aligned to their number where possible, since the devices of a package are nearer to
    each other; then they come from the node with the fewest free devices, and there from the
    smallest gap, so that the large gaps and the whole nodes stay for those who need them.
    """
    if width > free.shape[1]:
        return None
    fits = _windows(free, width).all(axis=2)
    node, start = np.nonzero(fits)
    if not len(node):
        return None
    num_free = np.count_nonzero(free, axis=1)[node]
    gap = _gaps(free)[node, start]
    best = np.lexsort((start, node, gap, num_free, misalignment(start, width)))[0]
    return _share(node[best], start[best], width)


def earliest_nodes(free_at: Floats, count: int) -> tuple[float, tuple[int, ...]] | None:
    """When so many nodes are free, and which; None: never.

    Where more are free by then, they are those that get free last: the others are of use meanwhile.
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
    """When so many contiguous devices of one node are free, and which; None: never."""
    if width > free_at.shape[1]:
        return None
    run_free_at = _windows(free_at, width).max(axis=2)
    at = float(run_free_at.min(initial=NEVER))
    if at == NEVER:
        return None
    node, start = np.nonzero(run_free_at == at)
    best = np.argmin(misalignment(start, width))
    return at, _share(node[best], start[best], width)


def longest_gap(free: Bools) -> int:
    """The most contiguous free devices that a node has."""
    return int(_gaps(free).max(initial=0))


def misalignment(start: Ints, width: int) -> Ints:
    """How far a run of so many devices begins from a multiple of the power of two that holds it."""
    block = 1 << (width - 1).bit_length()
    return start % block


def _windows(of: NDArray[_T], width: int) -> NDArray[_T]:
    return np.lib.stride_tricks.sliding_window_view(of, width, axis=1)


def _gaps(free: Bools) -> Ints:
    """The length of the gap that each free device is part of; 0 for those that are not free."""
    ahead = np.zeros(free.shape, dtype=np.intp)
    behind = np.zeros(free.shape, dtype=np.intp)
    num_devices = free.shape[1]
    for device in range(num_devices):
        before = ahead[:, device - 1] if device else 0
        ahead[:, device] = np.where(free[:, device], before + 1, 0)
    for device in reversed(range(num_devices)):
        after = behind[:, device + 1] if device + 1 < num_devices else 0
        behind[:, device] = np.where(free[:, device], after + 1, 0)
    gaps: Ints = np.maximum(ahead + behind - 1, 0)
    return gaps


def _share(node: np.intp, start: np.intp, width: int) -> Share:
    first = int(start)
    return Share(node=int(node), devices=tuple(range(first, first + width)))

"""What trial to ask for next, if any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from workers.packing.request import Room
from workers.protocol import LeaseAsk, LeaseRoom

END_WITHIN_S: Final = 10.0
"""Seconds after its deadline by which a probe's devices are free, whatever happens."""

MOST_WAITING: Final = 2
"""Leases that may wait for devices: one of the oldest trial, and one that was to fill a gap."""

_LONG_POLL_S: Final = 5.0
_SHORT_POLL_S: Final = 1.0
"""For what may start at this moment alone: a moment later it may be something else."""


def next_ask(
    *,
    usable: Sequence[int],
    all_usable: bool,
    num_waiting: int,
    room: Room,
    left_s: float | None,
) -> LeaseAsk | None:
    """The oldest trial that fits the allocation; while that one waits, others that fit beside it.

    So one trial is leased ahead while all devices are busy, and the next probe starts without
    a word with the service.

    Args:
        usable: devices of each node that can be used.
        all_usable: whether those are all nodes, those that have yet to join included.
        num_waiting: trials that wait for devices.
        room: what would start at once beside them.
        left_s: seconds that probes still have; None: for ever.

    Returns:
        None: no trial is needed.
    """
    if not usable or num_waiting >= MOST_WAITING:
        return None
    if not num_waiting:
        whole = LeaseRoom(nodes=len(usable), devices=max(usable))
        return _ask(_LONG_POLL_S, None if all_usable else whole, left_s)
    if not room.devices and not room.nodes:
        return None
    gap = LeaseRoom(nodes=room.nodes, devices=room.devices)
    return _ask(_SHORT_POLL_S, gap, room.longest_s)


def _ask(wait_s: float, room: LeaseRoom | None, left_s: float | None) -> LeaseAsk | None:
    if left_s is None:
        return LeaseAsk(wait_s=wait_s, room=room)
    # A trial that comes at the end of the wait has that much less time.
    longest_s = left_s - wait_s - END_WITHIN_S
    return LeaseAsk(wait_s=wait_s, room=room, longest_s=longest_s) if longest_s > 0 else None

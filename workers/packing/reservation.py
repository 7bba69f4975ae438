"""What is kept for the oldest probe that does not fit yet."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from workers.packing.choice import NEVER, Bools, earliest_devices, earliest_nodes
from workers.packing.devices import DeviceTable
from workers.packing.request import PackRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Devices that a probe will get."""

    key: Hashable
    """The probe."""
    devices: Bools
    """Which, by node."""
    lent_until_s: float
    """Others may use them if they end by then."""


def reserve(
    table: DeviceTable,
    request: PackRequest,
    *,
    whole: bool,
    now_s: float,
    ends_at_s: float | None,
) -> Reservation | None:
    """Keeps the devices for a probe that are free first; None: it has no prospect of any in time.

    Args:
        table: of all devices.
        request: the probe, which does not fit now.
        whole: whether it gets whole nodes.
        now_s: the time.
        ends_at_s: when the allocation ends; None: it doesn't.
    """
    found = earliest(table, request, whole=whole, now_s=now_s)
    if found is None:
        return None
    at_s, devices = found
    if ends_at_s is not None:
        expected = earliest(table, request, whole=whole, now_s=now_s, expected=True)
        assert expected is not None  # of the same devices
        if is_too_late(request, max(expected[0], now_s), ends_at_s):
            return None
        at_s = min(at_s, ends_at_s - request.at_most_s)
    return Reservation(key=request.key, devices=devices, lent_until_s=at_s)


def earliest(
    table: DeviceTable,
    request: PackRequest,
    *,
    whole: bool,
    now_s: float,
    expected: bool = False,
) -> tuple[float, Bools] | None:
    """When a probe can start and on which devices; None: not as things are.

    At the latest, or as expected; a time that is past means now.
    """
    free_at = table.free_at(now_s, expected=expected)
    free_at[list(request.avoid)] = NEVER
    devices = np.zeros(free_at.shape, dtype=np.bool_)
    if whole:
        node_free_at = table.node_free_at(free_at)
        node_free_at[table.num_devices < request.per_node] = NEVER
        at = earliest_nodes(node_free_at, request.num_nodes)
        if at is None:
            return None
        devices[list(at[1])] = True
        return at[0], devices
    found = earliest_devices(free_at, request.num_devices)
    if found is None:
        return None
    share = found[1]
    devices[share.node, share.devices[0] : share.devices[-1] + 1] = True
    return found[0], devices


def is_too_late(request: PackRequest, start_s: float, ends_at_s: float | None) -> bool:
    """Whether a probe that starts then may not end before the allocation does."""
    return ends_at_s is not None and start_s + request.at_most_s > ends_at_s

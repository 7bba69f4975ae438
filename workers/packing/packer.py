"""The packer: assigns the devices of an allocation to the waiting probes, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from layout_tuner.array_types import Bools
from layout_tuner.terminal.plurals import counted
from layout_tuner.workers.packing.devices import (
    NEVER,
    DeviceTable,
    FreeDevices,
    earliest_devices,
    earliest_nodes,
)
from layout_tuner.workers.packing.request import PackRequest, Placement, Room, Share

MAX_LOANS: Final = 64
"""Probes that may use the devices reserved for the oldest waiting probe, before these devices stay
empty until it starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """Devices that are kept for the oldest probe that does not fit yet."""

    key: Hashable
    devices: Bools
    """The devices, by node."""
    lent_until_s: float
    """Other probes may use them if they end by then."""


def earliest(
    table: DeviceTable, request: PackRequest, *, whole: bool, now_s: float, expected: bool = False
) -> tuple[float, Bools] | None:
    """When a probe can start, and on which devices; None: never, with the devices usable now.

    The time is the latest or the expected one; a time in the past means now.
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
    """Whether a probe that starts then may run past the end of the allocation."""
    return ends_at_s is not None and start_s + request.at_most_s > ends_at_s


class Packer:
    """Packs probes of different sizes into one allocation, in order and without starvation.

    A probe that needs more than one node, or all devices of one, gets whole nodes; a smaller one
    contiguous devices of a node. The oldest probe that does not fit gets a reservation: the devices
    that are free first, by the longest time that the running probes may take. Younger probes start
    before it where they do not delay it: on other devices, or where they end in time. (EASY
    backfill: Lifka, The ANL/IBM SP scheduling system, 1995.) Whole nodes come from as few groups
    (switches, NVLink domains) as the free nodes force, where groups are known (after
    arXiv:2509.15940, which places groups of ranks so).

    With `share_nodes`, probes smaller than a node may run beside others on it.
    """

    def __init__(self, *, share_nodes: bool) -> None:
        self.share_nodes = share_nodes
        self._table = DeviceTable()
        self._names: list[str] = []
        self._levels: tuple[str, ...] = ()
        self._unusable: dict[int, str] = {}
        self._waiting: dict[Hashable, PackRequest] = {}
        self._running: dict[Hashable, tuple[Share, ...]] = {}
        """Devices that no other probe may use meanwhile: whole nodes where a probe needs them."""
        self._loans: dict[Hashable, int] = {}

    def add_node(self, num_devices: int, *, name: str = "") -> int:
        """Appends a usable node; returns its position."""
        if num_devices < 1:
            raise ValueError(f"num_devices={num_devices} of a node is not positive")
        node = self._table.add_node(num_devices)
        self._names.append(name or f"node {node}")
        return node

    def set_levels(self, names: Sequence[str], groups: Sequence[tuple[str, ...]]) -> None:
        """Sets the levels of the network by name, smallest first, and each node's group at each.

        Groups of a name in two groups of the level above are two. Probes that run keep their nodes.
        """
        self._levels = tuple(names)
        paths = [["\0".join(each[level:]) for each in groups] for level in range(len(names))]
        rows = [np.unique(path, return_inverse=True)[1] for path in paths]
        self._table.levels = np.array(rows, dtype=np.intp).reshape(len(names), len(groups))

    def spans(self, placement: Placement) -> str:
        """How many groups of each level a probe's nodes lie in, for messages; empty: one node."""
        nodes = [share.node for share in placement]
        if len(nodes) < 2 or not self._levels:
            return ""
        parts = []
        for name, level in zip(self._levels, self._table.levels, strict=True):
            sizes = Counter(level[nodes].tolist()).values()
            parts.append(f"{len(sizes)} of {name} ({' + '.join(map(str, sizes))} nodes)")
        return f"spans {', '.join(parts)}"

    def set_usable(self, node: int, usable: bool, reason: str = "") -> None:
        """Sets whether probes may start on a node, and why not; running ones keep their devices."""
        self._table.usable[node] = usable
        self._unusable.pop(node, None)
        if not usable:
            self._unusable[node] = reason or "not usable"

    def submit(self, request: PackRequest) -> None:
        """Adds a probe at the end of the queue."""
        if request.key in self._waiting or request.key in self._running:
            raise ValueError(f"{request.key!r} waits or runs already")
        self._waiting[request.key] = request

    def withdraw(self, key: Hashable) -> None:
        del self._waiting[key]
        self._loans.pop(key, None)

    def place(self, now_s: float, ends_at_s: float | None) -> list[tuple[Hashable, Placement]]:
        """Assigns devices to as many probes as fit; they hold them until `release`.

        Args:
            now_s: the time, on any monotonic clock.
            ends_at_s: when the allocation ends, on the same clock; None: it does not end.
        """
        free = FreeDevices(self._table, self._table.free())
        spare, reservation = free, None
        started: list[tuple[Hashable, Placement]] = []
        for request in tuple(self._waiting.values()):
            if is_too_late(request, now_s, ends_at_s):
                continue
            placement = spare.choose(request, whole=self._is_whole(request))
            if placement is None and reservation is not None:
                placement = self._borrow(request, reservation, free, now_s)
            if placement is not None:
                held = self._start(request, placement, now_s)
                free.take(held)
                if spare is not free:
                    spare.take(held)
                started.append((request.key, placement))
            elif reservation is None:
                reservation = self._reserve(request, now_s, ends_at_s)
                if reservation is not None:
                    spare = free.without(reservation.devices)
        return started

    def release(self, key: Hashable) -> None:
        """Frees the devices of a probe that has ended."""
        self._table.release(self._running.pop(key))

    def has_prospect(self, key: Hashable, now_s: float, ends_at_s: float | None) -> bool:
        """Whether a waiting probe can get devices in time, with the nodes usable now."""
        return self._reserve(self._waiting[key], now_s, ends_at_s) is not None

    def why_waiting(self, now_s: float, ends_at_s: float | None) -> dict[Hashable, str]:
        """Why each probe waits, as a sentence."""
        free = FreeDevices(self._table, self._table.free())
        first: Hashable | None = None
        whys: dict[Hashable, str] = {}
        for request in self._waiting.values():
            whys[request.key] = self._why(request, now_s, ends_at_s, free, first)
            if first is None and self._reserve(request, now_s, ends_at_s) is not None:
                first = request.key
        return whys

    def room(self, now_s: float, ends_at_s: float | None) -> Room:
        """The largest further probe that would start at once without delaying the waiting ones."""
        left_s = None if ends_at_s is None else max(0.0, ends_at_s - now_s)
        free = FreeDevices(self._table, self._table.free())
        reservations = (self._reserve(one, now_s, ends_at_s) for one in self._waiting.values())
        reservation = next((one for one in reservations if one is not None), None)
        if reservation is None:
            return self._room(free, left_s)
        spare = free.without(reservation.devices)
        if spare.longest or not self._lends(reservation, now_s):
            return self._room(spare, left_s)
        return self._room(free, reservation.lent_until_s - now_s)

    def holders(self, node: int) -> list[Hashable]:
        return [
            key for key, held in self._running.items() if any(share.node == node for share in held)
        ]

    def _room(self, free: FreeDevices, longest_s: float | None) -> Room:
        devices = free.longest
        if not self.share_nodes and free.num_whole == 0:
            devices = 0
        return Room(nodes=free.num_whole, devices=devices, longest_s=longest_s)

    def _is_whole(self, request: PackRequest) -> bool:
        if not self.share_nodes or request.num_nodes > 1:
            return True
        return request.num_devices >= self._table.largest

    def _start(self, request: PackRequest, placement: Placement, now_s: float) -> tuple[Share, ...]:
        held = placement
        if self._is_whole(request):
            sizes = self._table.num_devices
            held = tuple(Share.of_first(one.node, int(sizes[one.node])) for one in placement)
        expected_s = request.at_most_s if request.expected_s is None else request.expected_s
        self._table.hold(held, until=now_s + request.at_most_s, expected_until=now_s + expected_s)
        self._running[request.key] = held
        self.withdraw(request.key)
        return held

    def _borrow(
        self, request: PackRequest, reservation: Reservation, free: FreeDevices, now_s: float
    ) -> Placement | None:
        """Chooses reserved devices for a probe that ends before they are needed."""
        if not self._lends(reservation, now_s + request.at_most_s):
            return None
        placement = free.choose(request, whole=self._is_whole(request))
        if placement is not None:
            self._loans[reservation.key] = self._loans.get(reservation.key, 0) + 1
        return placement

    def _lends(self, reservation: Reservation, until_s: float) -> bool:
        has_lent = self._loans.get(reservation.key, 0)
        return until_s <= reservation.lent_until_s and has_lent < MAX_LOANS

    def _reserve(
        self, request: PackRequest, now_s: float, ends_at_s: float | None
    ) -> Reservation | None:
        """Reserves the devices that get free first for a probe; None: none get free in time."""
        table, whole = self._table, self._is_whole(request)
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

    def _why(
        self,
        request: PackRequest,
        now_s: float,
        ends_at_s: float | None,
        free: FreeDevices,
        behind: Hashable | None,
    ) -> str:
        """Why a probe waits; `behind` is an older one for which free devices are kept."""
        whole, table = self._is_whole(request), self._table
        needs = _needed(request, whole=whole)
        large_enough = table.num_devices >= request.per_node
        if (num_nodes := np.count_nonzero(large_enough)) < request.num_nodes:
            has = f"{counted(int(num_nodes), 'node')} of {request.per_node} devices or more"
            return f"needs {needs}, and the allocation has {has}"
        if (num_usable := np.count_nonzero(large_enough & table.usable)) < request.num_nodes:
            states = sorted(self._unusable.items())
            unusable = ", ".join(f"{self._names[node]} is {why}" for node, why in states)
            return (
                f"needs more nodes than are usable: {num_usable} of {request.num_nodes}; {unusable}"
            )
        if ends_at_s is not None and request.at_most_s > ends_at_s - now_s:
            return (
                f"does not fit before the allocation ends in {max(0.0, ends_at_s - now_s):.0f} s: "
                f"it may take {request.at_most_s:.0f} s"
            )
        at = earliest(table, request, whole=whole, now_s=now_s)
        if at is None:
            return f"waits for {needs}: not on the nodes where it failed before, and no others are usable"
        num_free = free.num_whole if whole else free.longest
        waits = f"waits for {needs}: {num_free or 'none'} {'are' if num_free > 1 else 'is'} free"
        if num_free >= (request.num_nodes if whole else request.num_devices):
            kept = "kept for a probe that has waited longer"
            return f"{waits}, {kept if behind is not None else 'so it starts next'}"
        if behind is not None:
            return f"{waits}; another probe has waited longer"
        return f"{waits}, enough are in {max(0.0, at[0] - now_s):.0f} s at the latest"


def _needed(request: PackRequest, *, whole: bool) -> str:
    if whole:
        return counted(request.num_nodes, "whole node")
    many = "device" if request.num_devices == 1 else "contiguous devices"
    return f"{request.num_devices} {many} of a node"

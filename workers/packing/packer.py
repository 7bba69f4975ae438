"""The packer: gives the devices of an allocation to the probes that wait, in order."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from workers.packing.devices import DeviceTable
from workers.packing.free import FreeDevices
from workers.packing.reasons import Prospect, why_it_waits
from workers.packing.request import PackRequest, Room
from workers.packing.reservation import Reservation, earliest, is_too_late, reserve
from workers.packing.shares import Placement, Share

MAX_LOANS: Final = 64
"""Probes that may use, one after the other or side by side, devices reserved for the oldest that
waits, before these stay empty until it starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    placement: Placement
    held: tuple[Share, ...]
    """All that nobody else may use meanwhile: its whole nodes, where it has them whole."""


class Packer:
    """Packs probes of different sizes into one allocation; all or nothing, in order, none starved.

    A probe that needs more than one node, or all devices of one, gets whole nodes; a smaller one
    contiguous devices of a node. The oldest that does not fit gets a reservation: the devices that
    are free first, by what the running probes may take at most. Younger ones start beside it where
    they do not delay it: on other devices, or so short that they are gone by then. (EASY backfill:
    Lifka, The ANL/IBM SP scheduling system, 1995.)

    Args:
        num_devices_by_node: devices of each node.
        share_nodes: whether probes smaller than a node may run beside others on it.
        names: of the nodes, for people; by default their positions.
    """

    def __init__(
        self,
        num_devices_by_node: Sequence[int] = (),
        *,
        share_nodes: bool,
        names: Sequence[str] = (),
    ) -> None:
        self._share_nodes = share_nodes
        self._table = DeviceTable()
        self._names: list[str] = []
        self._unusable: dict[int, str] = {}
        self._waiting: dict[Hashable, PackRequest] = {}
        self._running: dict[Hashable, _Running] = {}
        self._loans: dict[Hashable, int] = {}
        for node, num_devices in enumerate(num_devices_by_node):
            self.add_node(num_devices, name=names[node] if names else "")

    def add_node(self, num_devices: int, *, name: str = "") -> int:
        """Appends a usable node, and returns its position."""
        if num_devices < 1:
            raise ValueError(f"num_devices={num_devices} of a node is not positive")
        node = self._table.add_node(num_devices)
        self._names.append(name or f"node {node}")
        return node

    def set_usable(self, node: int, usable: bool, reason: str = "") -> None:
        """Says whether probes may start on a node; those that run there keep what they have.

        Args:
            node: its position.
            usable: whether they may.
            reason: why not, for people: "quarantined", "lost", "checked".
        """
        self._table.usable[node] = usable
        self._unusable.pop(node, None)
        if not usable:
            self._unusable[node] = reason or "not usable"

    def submit(self, request: PackRequest) -> None:
        """A probe waits, behind those that do already."""
        if request.key in self._waiting or request.key in self._running:
            raise ValueError(f"{request.key!r} waits or runs already")
        self._waiting[request.key] = request

    def withdraw(self, key: Hashable) -> None:
        """A probe waits no longer."""
        del self._waiting[key]
        self._loans.pop(key, None)

    def place(self, now_s: float, ends_at_s: float | None) -> list[tuple[Hashable, Placement]]:
        """Starts as many probes as fit, each with its devices; they hold them until released.

        Args:
            now_s: the time, on any clock that only goes forward.
            ends_at_s: when the allocation ends, on the same clock; None: it doesn't.
        """
        free = FreeDevices(self._table, self._table.free())
        spare, reservation = free, None
        started: list[tuple[Hashable, Placement]] = []
        for request in tuple(self._waiting.values()):
            if is_too_late(request, now_s, ends_at_s):
                continue
            whole = self._is_whole(request)
            placement = spare.choose(request, whole=whole)
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
        """A probe has ended: what it held is free."""
        self._table.release(self._running.pop(key).held)

    def has_prospect(self, key: Hashable, now_s: float, ends_at_s: float | None) -> bool:
        """Whether a probe that waits can hope for devices, as things are."""
        return self._reserve(self._waiting[key], now_s, ends_at_s) is not None

    def why_waiting(self, now_s: float, ends_at_s: float | None) -> dict[Hashable, str]:
        """Why each probe that waits does so, in a sentence for people."""
        free = FreeDevices(self._table, self._table.free())
        first: Hashable | None = None
        whys: dict[Hashable, str] = {}
        for request in self._waiting.values():
            prospect = self._prospect(request, now_s, ends_at_s, free, first)
            whys[request.key] = why_it_waits(prospect)
            if first is None and self._reserve(request, now_s, ends_at_s) is not None:
                first = request.key
        return whys

    def room(self, now_s: float, ends_at_s: float | None) -> Room:
        """What is left beside those that wait, for one more that would start at once."""
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
        """The probes that hold something of a node."""
        return [
            key
            for key, running in self._running.items()
            if any(share.node == node for share in running.held)
        ]

    def _room(self, free: FreeDevices, longest_s: float | None) -> Room:
        devices = free.longest
        if not self._share_nodes and free.num_whole == 0:
            devices = 0
        return Room(nodes=free.num_whole, devices=devices, longest_s=longest_s)

    def _is_whole(self, request: PackRequest) -> bool:
        if not self._share_nodes or request.num_nodes > 1:
            return True
        return request.num_devices >= self._table.largest

    def _start(self, request: PackRequest, placement: Placement, now_s: float) -> tuple[Share, ...]:
        held = placement
        if self._is_whole(request):
            sizes = self._table.num_devices
            held = tuple(Share.of_first(one.node, int(sizes[one.node])) for one in placement)
        expected_s = request.at_most_s if request.expected_s is None else request.expected_s
        self._table.hold(held, until=now_s + request.at_most_s, expected_until=now_s + expected_s)
        self._running[request.key] = _Running(placement=placement, held=held)
        self.withdraw(request.key)
        return held

    def _borrow(
        self, request: PackRequest, reservation: Reservation, free: FreeDevices, now_s: float
    ) -> Placement | None:
        """Devices for a probe that is gone before they are needed by the one they are kept for."""
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
        whole = self._is_whole(request)
        return reserve(self._table, request, whole=whole, now_s=now_s, ends_at_s=ends_at_s)

    def _prospect(
        self,
        request: PackRequest,
        now_s: float,
        ends_at_s: float | None,
        free: FreeDevices,
        first: Hashable | None,
    ) -> Prospect:
        whole = self._is_whole(request)
        at = earliest(self._table, request, whole=whole, now_s=now_s)
        large_enough = self._table.num_devices >= request.per_node
        usable = large_enough & self._table.usable
        return Prospect(
            request=request,
            whole=whole,
            num_nodes=int(np.count_nonzero(large_enough)),
            num_usable=int(np.count_nonzero(usable)),
            unusable={self._names[node]: why for node, why in sorted(self._unusable.items())},
            num_free=free.num_whole if whole else free.longest,
            starts_in_s=None if at is None else max(0.0, at[0] - now_s),
            ends_in_s=None if ends_at_s is None else ends_at_s - now_s,
            behind=first,
        )

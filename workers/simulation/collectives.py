"""Seconds of collectives and transfers, by the placement of their groups and by message size.

Groups of one kind communicate at the same time and share the network cards of a node, and the
links inside it. The library takes a ring or a tree, whichever is faster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from layout_tuner.workers.simulation.fabrics import Fabric, Steps
from layout_tuner.workers.simulation.placement import Place

_TREE_OVERHEAD: Final = 1.15
"""Bytes that a tree moves over those of a ring: its ends are half idle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    fabric: Fabric
    speed: float = 1.0
    """Factor on the bandwidths across nodes."""
    near_speed: float = 1.0
    """Factor on the bandwidths inside a node."""
    slowdown: float = 1.0
    """Factor on latencies."""

    def gather_s(self, place: Place, size_bytes: float) -> float:
        """Seconds of an all-gather of so many bytes in all."""
        near, far = self.fabric.near_gather, self.fabric.far_gather
        return self._ring_s(place, size_bytes, near if place.is_inside else far)

    def scatter_s(self, place: Place, size_bytes: float) -> float:
        """Seconds of a reduce-scatter of so many bytes in all."""
        near, far = self.fabric.near_scatter, self.fabric.far_scatter
        return self._ring_s(place, size_bytes, near if place.is_inside else far)

    def reduce_s(self, place: Place, size_bytes: float) -> float:
        """Seconds of an all-reduce of so many bytes."""
        if place.size == 1 or not size_bytes:
            return 0.0
        start_s = self.fabric.start_s * self.slowdown
        ring = self.scatter_s(place, size_bytes) + self.gather_s(place, size_bytes) - start_s
        steps = self.fabric.near_scatter if place.is_inside else self.fabric.far_scatter
        depth = math.ceil(math.log2(place.size))
        small_s = min(steps.latencies_s) if place.is_inside else steps.latencies_s[0]
        latency_s = 2 * depth * self.slowdown * small_s
        moved_s = 2 * _TREE_OVERHEAD * size_bytes / self.bandwidth(place, steps)
        return min(ring, start_s + latency_s + moved_s)

    def exchange_s(self, place: Place, size_bytes: float) -> float:
        """Seconds of an all-to-all in which each rank has so many bytes for all, itself included.

        A rank sends a message to each other one. Those to other nodes share the node's cards, and
        those beyond a larger unit the links of all its devices.
        """
        if place.size == 1 or not size_bytes:
            return 0.0
        near = self._inside(min(place.here, place.size)) if place.here > 1 else math.inf
        share = size_bytes / place.size
        inside_s = (place.here - 1) * share / (near * self.near_speed)
        start_s = self.fabric.start_s * self.slowdown
        if place.is_inside:
            return start_s + inside_s
        steps = self.fabric.far_gather
        sent = place.crossing * place.here * (place.size - place.here) * share
        # A job has cards of a domain for the devices that it has there.
        used = place.crossing * place.here / self.fabric.domain if self.fabric.domain else 1.0
        across_s = sent / (steps.bytes_per_s * self.speed * min(used, 1.0))
        latency_s = self.slowdown * steps.latencies_s[0] * (place.num_nodes - 1)
        for outer, level in zip(place.outer, self.fabric.outer, strict=False):
            sent = outer.crossing * outer.here * (place.size - outer.here) * share
            across_s = max(across_s, sent / (level.bytes_per_s * self.speed * outer.devices))
        latency_s += self._further_s(place)
        return start_s + max(inside_s, across_s) + latency_s

    def hop_s(self, senders: int, *, levels: int, size_bytes: float) -> float:
        """Seconds of a transfer to another rank while so many ranks of the node do the same.

        It crosses so many levels of the network, see `Placement.senders`.
        """
        outer = self.fabric.outer[: max(levels - 1, 0)]
        if levels:
            steps = self.fabric.far_gather
            bandwidth = self.speed * steps.bytes_per_s / max(senders, self.fabric.node_cards)
            bandwidth = min(bandwidth, *(self.speed * each.bytes_per_s for each in outer), math.inf)
        else:
            steps = self.fabric.near_gather
            bandwidth = self.near_speed * self._inside(2)
        further_s = sum(each.latency_s for each in outer[-1:])
        latency_s = self.slowdown * (self.fabric.start_s + steps.latencies_s[0] + further_s)
        return latency_s + size_bytes / bandwidth

    def bandwidth(self, place: Place, steps: Steps) -> float:
        """Bytes a second that each rank of a ring passes on."""
        if place.is_inside:
            inside = self._inside(place.size, steps)
            if place.is_apart:
                inside = min(inside, self.fabric.apart_bytes_per_s)
            return inside * self.near_speed
        cards = min(place.here, self.fabric.node_cards) / self.fabric.node_cards
        across = self.speed * steps.bytes_per_s * min(1 / place.crossing, cards)
        for outer, level in zip(place.outer, self.fabric.outer, strict=False):
            if outer.num_nodes > 1:
                share = min(outer.devices / outer.crossing, outer.here)
                across = min(across, self.speed * level.bytes_per_s * share)
        if place.here == 1:
            return across
        return min(across, self._inside(place.here) * self.near_speed)

    def _inside(self, ranks: int, whole: Steps | None = None) -> float:
        """Bandwidth inside a node by the ranks of a group; of those not listed the next smaller."""
        table = self.fabric.near_bytes_per_s
        known = [n for n in table if n <= ranks] or [min(table)]
        if ranks >= max(table):
            return (whole or self.fabric.near_gather).bytes_per_s
        return table[max(known)]

    def _ring_s(self, place: Place, size_bytes: float, steps: Steps) -> float:
        if place.size == 1 or not size_bytes:
            return 0.0
        share = size_bytes / place.size
        step_s = self.slowdown * steps.latency_s(share) + share / self.bandwidth(place, steps)
        rounds_s = (place.size - 1) * step_s + self._further_s(place)
        return self.slowdown * self.fabric.start_s + rounds_s

    def _further_s(self, place: Place) -> float:
        """Latency of the steps of a ring, or of an exchange, that leave larger units."""
        return self.slowdown * sum(
            (outer.num_nodes - 1) * level.latency_s
            for outer, level in zip(place.outer, self.fabric.outer, strict=False)
        )

"""Where the groups of a layout are on the nodes, and how many share a node's network cards.

Ranks are numbered as by `search_spaces.layouts.rank_mesh`, and fill one node after the other.
"""

# ruff: noqa: N803, N806 (arrays carry their shape in the name: G groups, R ranks of each)

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from layout_tuner.array_types import Ints
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.level_units import level_units, unit_sizes
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns

Axis = Literal["tp", "tp_columns", "cp", "data", "etp", "ep", "edp"]
"""The groups that communicate. data: those that sum gradients, over dp and cp; edp: those that sum
gradients of experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The placement of the groups of an axis: that of the worst.

    A node is a domain of nodes where there are such (`Cluster.domain_devices`).
    """

    size: int
    """Ranks of each group."""
    num_nodes: int
    """Most nodes that a group spans."""
    here: int
    """Fewest ranks that a group which leaves its node has on one."""
    crossing: int
    """Most groups that leave the same node."""
    is_apart: bool = False
    """Whether no two ranks of a group share a part of a node."""
    devices: int = 0
    """Devices of the job on a node."""
    outer: tuple[Place, ...] = ()
    """The same with the units of each larger level as nodes, smallest first."""

    @property
    def is_inside(self) -> bool:
        """Whether no group leaves its node."""
        return self.num_nodes == 1


ALONE = Place(size=1, num_nodes=1, here=1, crossing=0)


@dataclass(frozen=True)
class Placement:
    """The ranks of a layout on nodes."""

    layout: Layout
    devices_per_node: int
    part: int = 0
    """Devices of a part of a node; 0: it has none."""
    units: tuple[int, ...] = ()
    """Devices of the job in a domain, and in units of the levels beyond; empty: nodes alone."""

    @classmethod
    def on(cls, layout: Layout, cluster: Cluster) -> Placement:
        """The ranks of a layout on the levels of a cluster."""
        node, sizes = cluster.devices_per_node, unit_sizes(cluster)
        if not cluster.levels:
            return cls(layout, node)
        units = zip(level_units(cluster, LayoutColumns.of_each([layout])), sizes, strict=True)
        far = tuple(int(np.max(unit)) for unit, size in units if size >= cluster.domain_devices)
        return cls(layout, node, max((n for n in sizes if n < node), default=0), far)

    @cached_property
    def ranks(self) -> Ints:
        """Global ranks; axes dp, pp, cp, tp, tp_columns."""
        layout = self.layout
        inner = (layout.cp, layout.tp, layout.tp_columns)
        every = np.arange(layout.num_devices)
        if layout.rank_order == "tp_cp_dp_pp":
            return every.reshape(layout.pp, layout.dp, *inner).swapaxes(0, 1)
        return every.reshape(layout.dp, layout.pp, *inner)

    def groups(self, axis: Axis) -> Ints:
        """Global ranks of every group of an axis; shape (G, R)."""
        layout, ranks = self.layout, self.ranks
        match axis:
            case "tp":
                return ranks.swapaxes(3, 4).reshape(-1, layout.tp)
            case "tp_columns":
                return ranks.reshape(-1, layout.tp_columns)
            case "cp":
                return np.moveaxis(ranks, 2, -1).reshape(-1, layout.cp)
            case "data":
                return ranks.transpose(1, 3, 4, 0, 2).reshape(-1, layout.dp_cp)
        stages = ranks.transpose(1, 0, 2, 3, 4).reshape(layout.pp, -1)
        experts = stages.reshape(layout.pp, -1, layout.ep, layout.etp)  # pp, edp, ep, etp
        if axis == "etp":
            return experts.reshape(-1, layout.etp)
        if axis == "ep":
            return experts.swapaxes(2, 3).reshape(-1, layout.ep)
        return experts.transpose(0, 2, 3, 1).reshape(-1, layout.edp)

    def place(self, axis: Axis) -> Place:
        return self._place(self.groups(axis))

    def shards(self, axis: Literal["data", "edp"], size: int) -> tuple[Place, Place]:
        """Of the neighbours that share what ZeRO shards, and of those that have the same share."""
        groups_GR = self.groups(axis)
        parts = groups_GR.reshape(len(groups_GR), -1, size)
        same = parts.swapaxes(1, 2)
        return self._place(parts.reshape(-1, size)), self._place(same.reshape(-1, same.shape[2]))

    def _place(self, ranks_GR: Ints) -> Place:
        if ranks_GR.shape[1] == 1:
            return ALONE
        domain, *units = self.units or (self.devices_per_node,)
        parts = np.sort(ranks_GR // self.part, axis=1) if self.part else np.zeros((1, 2))
        return replace(
            _on_nodes(ranks_GR, domain),
            is_apart=bool((np.diff(parts, axis=1) > 0).all()),
            outer=tuple(_on_nodes(ranks_GR, unit) for unit in units),
        )

    def senders(self, stage_rank: int) -> tuple[int, int]:
        """Ranks of a node that send to the next pipeline rank at once, and the levels they cross.

        These are 0 inside a node or a domain, and 1 to another one inside the next larger unit.
        """
        here_R = self.ranks[:, stage_rank].reshape(-1)
        there_R = self.ranks[:, (stage_rank + 1) % self.layout.pp].reshape(-1)
        units = self.units or (self.devices_per_node,)
        levels = sum(bool((here_R // unit != there_R // unit).any()) for unit in units)
        here = here_R // units[0]
        crosses = here != there_R // units[0]
        return int(np.bincount(here[crosses] if levels else here).max()), levels


def _on_nodes(ranks_GR: Ints, devices: int) -> Place:
    size = ranks_GR.shape[1]
    nodes_GR = np.sort(ranks_GR // devices, axis=1)
    begins = np.diff(nodes_GR, axis=1, prepend=-1) != 0
    spans = begins.sum(axis=1)
    if spans.max() == 1:
        return Place(size=size, num_nodes=1, here=size, crossing=0, devices=devices)
    leaves = spans > 1
    starts = np.flatnonzero(begins[leaves])
    counts = np.diff(starts, append=leaves.sum() * size)
    crossing = np.bincount(nodes_GR[leaves].reshape(-1)[starts])
    return Place(
        size=size,
        num_nodes=int(spans.max()),
        here=int(counts.min()),
        crossing=int(crossing.max()),
        devices=devices,
    )

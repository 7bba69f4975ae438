"""Bandwidth and latency of the links that the groups of a layout use, by level of the network.

Ranks are numbered with tensor columns fastest, then tp, cp, dp and pp, as in AxoNN, and without
columns in Megatron-LM; beside experts the same ranks with etp fastest, then ep and edp. With
another order of ranks (`Layout.rank_order`) pp comes before dp and edp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

import numpy as np

from layout_tuner.array_types import Bools, Floats, Ints
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.level_units import level_units, unit_sizes
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns

CARDS_EXPONENT: Final = 0.85
"""Growth of a data-parallel group's bandwidth between nodes with the ranks that it has on each: two
network cards carry less than twice as much, since all groups reduce at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LevelLinks:
    """The links between the units of a level of the network."""

    unit: Ints | int
    """Devices of each layout in one unit."""
    bytes_per_s: float
    """Bandwidth of a device to other units."""
    latency_s: float
    place: Literal["in node", "in domain", "far"]
    """Whether a unit is a part of a node, a part of a domain (`Cluster.domain_devices`), or larger;
    the network beyond domains is far."""

    def rows(self, rows: Ints) -> LevelLinks:
        """The links of some of the layouts."""
        return self if isinstance(self.unit, int) else replace(self, unit=self.unit[rows])


def level_links(cluster: Cluster, columns: LayoutColumns) -> tuple[LevelLinks, ...]:
    """The links between the units of each level but the largest, from the smallest one."""
    node, domain = cluster.devices_per_node, cluster.domain_devices
    found = zip(
        unit_sizes(cluster), level_units(cluster, columns), cluster.network[1:], strict=True
    )
    return tuple(
        LevelLinks(
            unit=unit,
            bytes_per_s=level.bandwidth_bytes_per_s or np.inf,
            latency_s=level.latency_s or 0.0,
            place="in node" if size < node else "in domain" if size < domain else "far",
        )
        for size, unit, level in found
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupLinks:
    """The links of groups of ranks, in each layout."""

    inside: Bools
    """Whether a group stays inside a domain, which is a node where the network has none."""
    here: Ints
    """Ranks of a group in each of its domains."""
    ranks: Ints
    near_bytes_per_s: Floats
    """Bandwidth per rank among the ranks in a domain."""
    bytes_per_s: Floats
    """Bandwidth per rank of a ring over the group."""
    latency_s: Floats
    """Latency of one step around it."""
    beyond: tuple[tuple[LevelLinks, Ints, Bools], ...]
    """Each level with the ranks of a group in one of its units, and whether all are in one."""

    @classmethod
    def of(
        cls,
        ranks: Ints,
        stride: Ints | int,
        cluster: Cluster,
        levels: tuple[LevelLinks, ...],
        cards_exponent: float = CARDS_EXPONENT,
    ) -> GroupLinks:
        """The links of groups whose ranks are neighbours, or so many ranks apart.

        A group that spans nodes uses the network cards of its own ranks, because the other cards
        serve other groups: with g ranks on a node it has g times the bandwidth of a device, or a
        little less, and at most the bandwidth inside the node. The same holds of larger units.
        """

        def spread(unit: Ints | int) -> tuple[Ints, Bools]:
            return np.clip(unit // stride, 1, ranks), stride * ranks <= unit

        return cls.placed(ranks, spread, cluster, levels, cards_exponent, stride)

    @classmethod
    def placed(
        cls,
        ranks: Ints,
        spread: Callable[[Ints | int], tuple[Ints, Bools]],
        cluster: Cluster,
        levels: tuple[LevelLinks, ...],
        cards_exponent: float = CARDS_EXPONENT,
        stride: Ints | int = 1,
    ) -> GroupLinks:
        """The links of groups, with `spread` the ranks in a unit, and whether all are in one.

        With a stride of s, s groups lie across each other in a node. Bandwidths by the number of
        ranks inside a node are of neighbours; where ranks are apart, the levels inside the node
        limit them.
        """
        here, _ = spread(cluster.devices_per_node)
        rate = shared_bandwidths(cluster, stride, inside_bandwidths(cluster)[here])
        latency_s: Floats = np.full(here.shape, cluster.network[0].latency_s)
        beyond: list[tuple[LevelLinks, Ints, Bools]] = []
        near, near_here, near_inside = rate, here, np.ones_like(here, dtype=bool)
        for level in levels:
            here, inside = spread(level.unit)
            cards = np.arange(np.max(level.unit) + 1) ** cards_exponent
            out, alone = level.bytes_per_s * cards[here], here == 1
            latency_s = np.where(inside, latency_s, level.latency_s)
            if level.place == "far" and not any(each.place == "far" for each, _, _ in beyond):
                near, near_here, near_inside = rate, here, inside
            if level.place == "in node":
                rate = np.where(inside | (np.asarray(stride) == 1), rate, np.minimum(rate, out))
            else:
                across = np.minimum(np.where(alone, np.inf, rate), out)
                rate = np.where(inside & ~alone, rate, across)
            beyond.append((level, here, inside))
        return cls(
            inside=near_inside,
            here=near_here,
            ranks=ranks,
            near_bytes_per_s=near,
            bytes_per_s=rate,
            latency_s=latency_s,
            beyond=tuple(beyond),
        )

    def mean_latency_s(self, cluster: Cluster) -> Floats:
        """Mean latency of the n - 1 steps around a ring; on k nodes, k - 1 of them leave a node.

        This is NCCL's own model (graph/tuning.cc, `nInterSteps`), applied to each level.
        """
        steps = np.maximum(self.ranks - 1.0, 1.0)
        below_s = cluster.network[0].latency_s or 0.0
        mean_s = np.full(steps.shape, below_s)
        for level, here, inside in self.beyond:
            far = np.maximum(self.ranks / here - 1.0, 1.0)
            further = mean_s + far / steps * (level.latency_s - below_s)
            mean_s, below_s = np.where(inside, mean_s, further), level.latency_s
        return mean_s

    def across_s(self, sent_bytes: Floats, n: Floats) -> Floats:
        """Seconds of an exchange beyond domains of so many bytes between each two of n ranks."""
        seconds = [
            sent_bytes * (n - here) / level.bytes_per_s
            for level, here, _ in self.beyond
            if level.place == "far"
        ]
        return np.asarray(np.maximum.reduce(seconds), dtype=np.float64)

    @property
    def doublings(self) -> Floats:
        """log2 of the number of nodes, or domains, that a group spans."""
        return np.asarray(np.log2(self.ranks / self.here), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Links:
    """The links of each axis of each layout."""

    columns: LayoutColumns
    cluster: Cluster
    levels: tuple[LevelLinks, ...]
    """The levels of the network, with the devices of each layout (`level_links`)."""

    @cached_property
    def tensor(self) -> GroupLinks:
        return GroupLinks.of(
            self.columns.tp, self.columns.tp_columns, self.cluster, self.levels, 1.0
        )

    @cached_property
    def tensor_columns(self) -> GroupLinks:
        return GroupLinks.of(self.columns.tp_columns, 1, self.cluster, self.levels, 1.0)

    @cached_property
    def context(self) -> GroupLinks:
        return GroupLinks.of(self.columns.cp, self.columns.tp_ranks, self.cluster, self.levels)

    @cached_property
    def data(self) -> GroupLinks:
        """Links of groups that sum gradients, over dp and cp.

        Where pp comes before dp, the ranks of cp are neighbours, and those of dp have the stages of
        a replica between them.
        """
        columns, is_late = self.columns, self.columns.rank_order != 0
        usual = GroupLinks.of(columns.dp_cp, columns.tp_ranks, self.cluster, self.levels)
        if not is_late.any():
            return usual
        stride = columns.tp_ranks * columns.cp * columns.pp

        def spread(unit: Ints | int) -> tuple[Ints, Bools]:
            of_cp = np.clip(unit // columns.tp_ranks, 1, columns.cp)
            of_dp = columns.cp * np.clip(unit // stride, 1, columns.dp)
            here = np.where(of_cp < columns.cp, of_cp, of_dp)
            inside = stride * (columns.dp - 1) + columns.tp_ranks * columns.cp <= unit
            by_tp = np.clip(unit // columns.tp_ranks, 1, columns.dp_cp)
            return (
                np.where(is_late, here, by_tp),
                np.where(is_late, inside, columns.tp_ranks * columns.dp_cp <= unit),
            )

        return GroupLinks.placed(
            columns.dp_cp,
            spread,
            self.cluster,
            self.levels,
            stride=np.where(is_late & (columns.cp == 1), stride, columns.tp_ranks),
        )

    @cached_property
    def expert_tensor(self) -> GroupLinks:
        """Links of groups that share each expert's weights, over etp."""
        return GroupLinks.of(self.columns.etp, 1, self.cluster, self.levels, 1.0)

    @cached_property
    def expert(self) -> GroupLinks:
        """Links of groups that divide the experts, over ep."""
        return GroupLinks.of(self.columns.ep, self.columns.etp, self.cluster, self.levels)

    @cached_property
    def expert_data(self) -> GroupLinks:
        """Links of groups that sum the gradients of experts, over edp."""
        between = np.where(self.columns.rank_order != 0, self.columns.pp, 1)
        stride = self.columns.etp * self.columns.ep * between
        return GroupLinks.of(self.columns.edp, stride, self.cluster, self.levels)

    @cached_property
    def pipeline_inside(self) -> Bools:
        """Whether all stages of a pipeline are in one domain, or node."""
        return np.asarray(self.pipeline_devices <= self._domain.unit)

    @cached_property
    def pipeline_devices(self) -> Ints:
        """Devices from the first to the last rank of a pipeline."""
        columns = self.columns
        return columns.num_devices // np.where(columns.rank_order != 0, columns.dp, 1)

    @property
    def _domain(self) -> LevelLinks:
        """The links between the largest units that are near."""
        return next(level for level in self.levels if level.place == "far")

    @cached_property
    def pipeline_bytes_per_s(self) -> Floats:
        """Bandwidth from a stage to its neighbours: of the slowest boundary, which every stage has.

        Where stages are neighbours and a node holds several, a stage has one boundary to another
        node at most, and the one to the node's other stage beside it. The cards are then shared by
        the ranks of a stage and not by all of the node.
        """
        columns, cluster, domain = self.columns, self.cluster, self._domain
        usual = near = inside_bandwidths(cluster)[min(2, cluster.devices_per_node)]
        for level in self.levels:
            if level.place != "in node":
                slower = level.bytes_per_s if level.place == "far" else min(near, level.bytes_per_s)
                usual = np.where(self.pipeline_devices <= level.unit, usual, slower)
        stage = columns.tp_ranks * columns.cp
        beside = (columns.rank_order != 0) & ~self.pipeline_inside & (2 * stage <= domain.unit)
        if not beside.any():
            return np.asarray(usual)
        out = np.minimum(domain.bytes_per_s * (domain.unit / stage) ** CARDS_EXPONENT, near)
        return np.asarray(np.where(beside, 2.0 / (1.0 / near + 1.0 / out), usual))

    @cached_property
    def pipeline_latency_s(self) -> Floats:
        """Latency of one transfer there."""
        latency_s = np.full(self.columns.pp.shape, self.cluster.network[0].latency_s, np.float64)
        for level in self.levels:
            inside = self.pipeline_devices <= level.unit
            latency_s = np.where(inside, latency_s, level.latency_s)
        return latency_s


def traffic_by_level(layout: Layout, cluster: Cluster) -> dict[str, tuple[str, ...]]:
    """The axes of a layout whose groups communicate over each level: the largest that they need.

    The levels are in their order, those without traffic too.
    """
    columns = LayoutColumns.of_each([layout])
    links = Links(columns, cluster, level_links(cluster, columns))
    axes = {"tp": links.tensor, "tp_columns": links.tensor_columns, "cp": links.context}
    axes |= {"ep": links.expert, "etp": links.expert_tensor, "dp": links.data}
    insides = {
        axis: [bool(inside[0]) for _, _, inside in group.beyond]
        for axis, group in axes.items()
        if getattr(layout, axis) > 1
    }
    if layout.pp > 1:
        devices = links.pipeline_devices
        insides["pp"] = [bool(np.all(devices <= level.unit)) for level in links.levels]
    names = [level.name for level in cluster.network]
    reached = {axis: names[inside.count(False)] for axis, inside in insides.items()}
    return {name: tuple(axis for axis, at in reached.items() if at == name) for name in names}


def traffic_in_words(layout: Layout, cluster: Cluster) -> str:
    """`traffic_by_level` as "tray: tp; domain: ep, dp", or none; empty: there are no levels."""
    if not cluster.levels:
        return ""
    carried = traffic_by_level(layout, cluster).items()
    return "; ".join(f"{name}: {', '.join(axes)}" for name, axes in carried if axes) or "none"


def shared_bandwidths(cluster: Cluster, stride: Ints | int, alone: Floats) -> Floats:
    """Bandwidth inside a node of groups whose ranks are so far apart, which is `alone` for one.

    Where the node has one path, the groups that lie across each other divide that of a whole node.
    """
    if not cluster.shared_intra_node_path:
        return alone
    whole = inside_bandwidths(cluster)[-1]
    beside = np.clip(stride, 1, cluster.devices_per_node)
    return np.where(beside > 1, np.minimum(whole / beside, alone), alone)


def inside_bandwidths(cluster: Cluster) -> Floats:
    """Bandwidth inside a node by the number of ranks, from 0 to a whole node.

    A number of ranks that the cluster does not list has the bandwidth of the next smaller listed
    number, or of the smallest one. Without a list, the bandwidth is a tenth of the memory
    bandwidth.
    """
    listed = dict(sorted(cluster.intra_node_bandwidth_bytes_per_s.items()))
    current = next(iter(listed.values()), cluster.memory_bandwidth_bytes_per_s / 10.0)
    table = np.empty(cluster.devices_per_node + 1)
    for ranks in range(cluster.devices_per_node + 1):
        current = listed.get(ranks, current)
        table[ranks] = current
    return table

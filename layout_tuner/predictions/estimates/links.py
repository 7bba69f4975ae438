"""Bandwidth and latency of the links that the groups of a layout use, inside and between nodes.

Ranks are numbered with tensor columns fastest, then tp, cp, dp and pp, as in AxoNN, and without
columns in Megatron-LM; beside experts the same ranks with etp fastest, then ep and edp. With
another order of ranks (`Layout.rank_order`) pp comes before dp and edp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from layout_tuner.array_types import Bools, Floats, Ints
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns

CARDS_EXPONENT: Final = 0.85
"""Growth of a data-parallel group's bandwidth between nodes with the ranks that it has on each: two
network cards carry less than twice as much, since all groups reduce at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GroupLinks:
    """The links of groups of ranks, in each layout."""

    inside: Bools
    """Whether a group stays inside a node."""
    here: Ints
    """Ranks of a group on each of its nodes."""
    ranks: Ints
    near_bytes_per_s: Floats
    """Bandwidth per rank among the ranks on a node."""
    bytes_per_s: Floats
    """Bandwidth per rank of a ring over the group."""
    latency_s: Floats
    """Latency of one step around it."""

    @classmethod
    def of(
        cls,
        ranks: Ints,
        stride: Ints | int,
        cluster: Cluster,
        cards_exponent: float = CARDS_EXPONENT,
    ) -> GroupLinks:
        """The links of groups whose ranks are neighbours, or so many ranks apart.

        A group that spans nodes uses the network cards of its own ranks, because the other cards
        serve other groups: with g ranks on a node it has g times the bandwidth of a device, or a
        little less, and at most the bandwidth inside the node.
        """
        node = cluster.devices_per_node
        here = np.clip(node // stride, 1, ranks)
        return cls.placed(ranks, here, stride * ranks <= node, cluster, cards_exponent, stride)

    @classmethod
    def placed(
        cls,
        ranks: Ints,
        here: Ints,
        inside: Bools,
        cluster: Cluster,
        cards_exponent: float = CARDS_EXPONENT,
        stride: Ints | int = 1,
    ) -> GroupLinks:
        """The links of groups of which so many ranks are on each node.

        With a stride of s, s groups lie across each other there.
        """
        node, alone = cluster.devices_per_node, here == 1
        near = shared_bandwidths(cluster, stride, inside_bandwidths(cluster)[here])
        cards = np.arange(node + 1) ** cards_exponent
        far = cluster.inter_node_bandwidth_bytes_per_s * cards[here]
        across = np.minimum(np.where(alone, np.inf, near), far)
        near_s, far_s = cluster.intra_node_latency_s, cluster.inter_node_latency_s
        return cls(
            inside=inside,
            here=here,
            ranks=ranks,
            near_bytes_per_s=near,
            bytes_per_s=np.where(inside & ~alone, near, across),
            latency_s=np.where(inside, near_s, far_s),
        )

    def mean_latency_s(self, cluster: Cluster) -> Floats:
        """Mean latency of the n - 1 steps around a ring; on k nodes, k - 1 of them leave a node.

        This is NCCL's own model (graph/tuning.cc, `nInterSteps`).
        """
        steps = np.maximum(self.ranks - 1.0, 1.0)
        far = np.maximum(self.ranks / self.here - 1.0, 1.0)
        near_s, far_s = cluster.intra_node_latency_s, cluster.inter_node_latency_s
        return np.where(self.inside, near_s, near_s + far / steps * (far_s - near_s))

    @property
    def doublings(self) -> Floats:
        """log2 of the number of nodes that a group spans."""
        return np.asarray(np.log2(self.ranks / self.here), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Links:
    """The links of each axis of each layout."""

    columns: LayoutColumns
    cluster: Cluster

    @cached_property
    def tensor(self) -> GroupLinks:
        return GroupLinks.of(self.columns.tp, self.columns.tp_columns, self.cluster, 1.0)

    @cached_property
    def tensor_columns(self) -> GroupLinks:
        return GroupLinks.of(self.columns.tp_columns, 1, self.cluster, 1.0)

    @cached_property
    def context(self) -> GroupLinks:
        return GroupLinks.of(self.columns.cp, self.columns.tp_ranks, self.cluster)

    @cached_property
    def data(self) -> GroupLinks:
        """Links of groups that sum gradients, over dp and cp.

        Where pp comes before dp, the ranks of cp are neighbours, and those of dp have the stages of
        a replica between them.
        """
        columns, node = self.columns, self.cluster.devices_per_node
        usual = GroupLinks.of(columns.dp_cp, columns.tp_ranks, self.cluster)
        if not (columns.rank_order != 0).any():
            return usual
        stride = columns.tp_ranks * columns.cp * columns.pp
        of_cp = np.clip(node // columns.tp_ranks, 1, columns.cp)
        here = np.where(
            of_cp < columns.cp, of_cp, columns.cp * np.clip(node // stride, 1, columns.dp)
        )
        inside = stride * (columns.dp - 1) + columns.tp_ranks * columns.cp <= node
        return GroupLinks.placed(
            columns.dp_cp,
            np.where(columns.rank_order != 0, here, usual.here),
            np.where(columns.rank_order != 0, inside, usual.inside),
            self.cluster,
            stride=np.where(columns.cp > 1, columns.tp_ranks, stride),
        )

    @cached_property
    def expert_tensor(self) -> GroupLinks:
        """Links of groups that share each expert's weights, over etp."""
        return GroupLinks.of(self.columns.etp, 1, self.cluster, 1.0)

    @cached_property
    def expert(self) -> GroupLinks:
        """Links of groups that divide the experts, over ep."""
        return GroupLinks.of(self.columns.ep, self.columns.etp, self.cluster)

    @cached_property
    def expert_data(self) -> GroupLinks:
        """Links of groups that sum the gradients of experts, over edp."""
        between = np.where(self.columns.rank_order != 0, self.columns.pp, 1)
        stride = self.columns.etp * self.columns.ep * between
        return GroupLinks.of(self.columns.edp, stride, self.cluster)

    @cached_property
    def pipeline_inside(self) -> Bools:
        """Whether all stages of a pipeline are on one node."""
        columns = self.columns
        replicas = np.where(columns.rank_order != 0, columns.dp, 1)
        return np.asarray(columns.num_devices // replicas <= self.cluster.devices_per_node)

    @cached_property
    def pipeline_bytes_per_s(self) -> Floats:
        """Bandwidth from a stage to its neighbours: of the slowest boundary, which every stage has.

        Where stages are neighbours and a node holds several, a stage has one boundary to another
        node at most, and the one to the node's other stage beside it. The cards are then shared by
        the ranks of a stage and not by all of the node.
        """
        columns, cluster = self.columns, self.cluster
        node, far = cluster.devices_per_node, cluster.inter_node_bandwidth_bytes_per_s
        near = inside_bandwidths(cluster)[min(2, node)]
        usual = np.where(self.pipeline_inside, near, far)
        stage = columns.tp_ranks * columns.cp
        beside = (columns.rank_order != 0) & ~self.pipeline_inside & (2 * stage <= node)
        if not beside.any():
            return usual
        out = np.minimum(far * (node / stage) ** CARDS_EXPONENT, near)
        return np.where(beside, 2.0 / (1.0 / near + 1.0 / out), usual)

    @cached_property
    def pipeline_latency_s(self) -> Floats:
        """Latency of one transfer there."""
        near, far = self.cluster.intra_node_latency_s, self.cluster.inter_node_latency_s
        return np.where(self.pipeline_inside, near, far)


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

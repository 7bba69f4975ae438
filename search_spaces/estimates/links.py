"""Bandwidth and latency of the links that the groups of a layout use, inside and between nodes.

Ranks are numbered with tp fastest, then cp, dp and pp, as in Megatron-LM and the embedded trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout_columns import LayoutColumns

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

_CARDS_EXPONENT: Final = 0.85
"""Growth of a data-parallel group's bandwidth between nodes with the ranks that it has on each: two
network cards carry less than twice as much, since all groups reduce at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Links:
    """Bandwidth and latency for each axis of each layout."""

    tensor_inside: Bools
    """Whether a tensor-parallel group stays inside a node."""
    tensor_bytes_per_s: Floats
    """Bandwidth per rank of a ring over a tensor-parallel group."""
    tensor_latency_s: Floats
    """Latency of one step around it."""
    context_bytes_per_s: Floats
    """Bandwidth per rank of a ring over a context-parallel group."""
    context_latency_s: Floats
    """Latency of one step around it."""
    data_inside: Bools
    """Whether a group that sums gradients, over dp and cp, stays inside a node."""
    data_bytes_per_s: Floats
    """Bandwidth per rank of a ring over such a group."""
    data_latency_s: Floats
    """Latency of one step around it."""
    data_doublings: Floats
    """log2 of the number of nodes that such a group spans."""
    pipeline_inside: Bools
    """Whether all stages are on one node."""
    pipeline_bytes_per_s: Floats
    """Bandwidth from a stage to the next, at the slowest boundary."""
    pipeline_latency_s: Floats
    """Latency of one transfer there."""

    @classmethod
    def of(cls, columns: LayoutColumns, cluster: Cluster) -> Links:
        """The links of each layout.

        A group that spans nodes uses the network cards of its own ranks, because the other cards
        serve other groups: with g ranks on a node it has g times the bandwidth of a device, or for
        data parallelism a little less, and at most the bandwidth inside the node.
        """
        node = cluster.devices_per_node
        tp, cp, dp = columns.tp, columns.cp, columns.dp_cp
        inside = inside_bandwidths(cluster)
        tp_here = np.minimum(tp, node)
        dp_here, cp_here = np.clip(node // tp, 1, dp), np.clip(node // tp, 1, cp)
        tensor_inside, data_inside = tp <= node, tp * dp <= node
        context_inside = tp * cp <= node
        pipeline_inside = columns.num_devices <= node
        between = cluster.inter_node_bandwidth_bytes_per_s
        near, far = cluster.intra_node_latency_s, cluster.inter_node_latency_s
        alone = dp_here == 1
        return cls(
            tensor_inside=tensor_inside,
            tensor_bytes_per_s=_bandwidth(inside[tp_here], tensor_inside, between * tp_here),
            tensor_latency_s=np.where(tensor_inside, near, far),
            context_bytes_per_s=_bandwidth(
                inside[cp_here], context_inside, between * cp_here**_CARDS_EXPONENT
            ),
            context_latency_s=np.where(context_inside, near, far),
            data_inside=data_inside,
            data_bytes_per_s=_bandwidth(
                np.where(alone, np.inf, inside[dp_here]),
                data_inside & ~alone,
                between * dp_here**_CARDS_EXPONENT,
            ),
            data_latency_s=np.where(data_inside, near, far),
            data_doublings=np.log2(dp / dp_here),
            pipeline_inside=pipeline_inside,
            pipeline_bytes_per_s=np.where(pipeline_inside, inside[min(2, node)], between),
            pipeline_latency_s=np.where(pipeline_inside, near, far),
        )


def _bandwidth(inside: NDArray[Any], stays: Bools, across: NDArray[Any]) -> Floats:
    return np.asarray(np.where(stays, inside, np.minimum(inside, across)), dtype=np.float64)


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

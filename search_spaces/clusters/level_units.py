"""How jobs fill the units of the levels of a network."""

from __future__ import annotations

from functools import cache

import numpy as np

from layout_tuner.array_types import Ints
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns


def unit_sizes(cluster: Cluster) -> tuple[int, ...]:
    """Devices of a unit of each level but the largest (`Cluster.network`)."""
    return tuple(level.devices or cluster.num_devices for level in cluster.network[:-1])


def level_units(cluster: Cluster, columns: LayoutColumns) -> tuple[Ints | int, ...]:
    """Devices that each layout has in a unit of each level but the largest.

    Nodes and their parts are full. Of larger levels, a job has as many devices in each unit. Their
    number is the largest divisor of the job's devices that the unit holds, and that is a multiple
    of each group of ranks that fits into the unit: experts' groups first, then tensor and context
    parallel ones, a stage (with another order of ranks a pipeline), and the job. So a job of 128
    devices with groups of 64 that share experts has 64 devices in each of two domains of 72, and a
    job of 72 devices fills one domain.
    """
    node = cluster.devices_per_node
    return tuple(
        _share(columns, size, node) if size > node else size for size in unit_sizes(cluster)
    )


def _share(columns: LayoutColumns, size: int, node: int) -> Ints:
    fitting, inner = np.ones_like(columns.num_devices), columns.tp_ranks * columns.cp
    between = np.where(columns.rank_order != 0, columns.pp, columns.dp)
    experts = columns.etp * columns.ep
    for extent in (experts, inner, inner * between, columns.num_devices):
        both = np.lcm(fitting, extent)
        fitting = np.where(both <= size, both, fitting)
    pairs, of_each = np.unique(columns.num_devices * (size + 1) + fitting, return_inverse=True)
    shares = [_largest_share(*divmod(int(pair), size + 1), size, node) for pair in pairs]
    return np.asarray(shares)[of_each]


@cache
def _largest_share(devices: int, fitting: int, size: int, node: int) -> int:
    """The largest divisor up to `size` that is a multiple of what fits, and of a node if one is."""
    divisors = [each for each in range(fitting, size + 1, fitting) if devices % each == 0]
    of_nodes = [each for each in divisors if each % node == 0]
    return max(of_nodes or divisors, default=size)

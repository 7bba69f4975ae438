"""The risk that a pipeline across nodes stalls: a layout is many times slower than its terms say.

In a public sweep on up to 256 H100, every second layout with stages on different nodes took 1.5 to
100 times as long as its operations and bytes, without one failure, and the share grew with the
number of nodes. The cause (small messages, a full allocator) is in no description of a layout, so
it is a risk here and not a term: a layout that may stall is worth less of a first probe, and each
measured pipeline tells how much of the risk is real.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout_columns import LayoutColumns

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_NODES_AT_HALF: Final = 32.0
"""Nodes at which a pipeline stalls with probability 1/2, before any was measured."""
_GUESS_WEIGHT: Final = 1.0
"""Weight of that guess, in measured pipelines."""


class PipelineStalls:
    """The probability that each layout of a search stalls."""

    def __init__(self, columns: LayoutColumns, cluster: Cluster) -> None:
        nodes = np.maximum(columns.num_devices / cluster.devices_per_node, 1.0)
        self._is_exposed = (columns.pp > 1) & (nodes > 1.0)
        self._prior = np.where(self._is_exposed, nodes / (nodes + _NODES_AT_HALF), 0.0)

    def probability(self, rows: Ints, measured: Ints, slowed: Floats) -> Floats:
        """Probability that some layouts stall.

        Args:
            rows: the layouts.
            measured: the measured layouts; one that ran twice is there twice.
            slowed: how likely each of those runs was slowed down.
        """
        exposed = self._is_exposed[measured]
        guess = _GUESS_WEIGHT * self._prior[rows]
        return (
            np.asarray((guess + slowed[exposed].sum()) / (_GUESS_WEIGHT + exposed.sum()))
            * (self._is_exposed[rows])
        )

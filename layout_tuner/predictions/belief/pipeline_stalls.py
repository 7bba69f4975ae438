"""The risk that a pipeline across nodes stalls: a layout is many times slower than its terms say.

In a public sweep on up to 256 H100, every second layout with stages on different nodes took 1.5 to
100 times as long as its operations and bytes, without one failure, and the share grew with the
number of nodes. The cause (small messages, a full allocator) is in no description of a layout, so
it is a risk here and not a term: a layout that may stall is worth less of a first probe, and each
measured pipeline tells how much of the risk is real.

The sweep ran under Nanotron; published pipelines of Megatron-LM and Megatron-DeepSpeed on up to 384
nodes did not stall. So for a trainer that is not known, stalling at all is a hypothesis. Trainers
that are known keep the whole risk: it also stands for what the closed form leaves out of pipelines,
and with less of it searches of recorded and simulated pipelines took longer.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.estimates.trainer_storage import storage_hypotheses
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns

_NODES_AT_HALF: Final = 32.0
"""Nodes at which a pipeline stalls with probability 1/2, before any was measured."""
_STALLING: Final = 1.5 / 4.0
"""Probability that the pipelines of an unknown trainer stall at all: those of 1 of 3 known ones
did, with half a trainer added to each count."""
_GUESS_WEIGHT: Final = 1.0
"""Weight of that guess, in measured pipelines."""


class PipelineStalls:
    """The probability that each layout of a search stalls."""

    def __init__(self, columns: LayoutColumns, cluster: Cluster, software: str = "") -> None:
        is_known = len(storage_hypotheses(software, cluster)) == 1
        stalling = 1.0 if is_known else _STALLING
        nodes = np.maximum(columns.num_devices / cluster.devices_per_node, 1.0)
        self._is_exposed = (columns.pp > 1) & (nodes > 1.0)
        at_scale = stalling * nodes / (nodes + _NODES_AT_HALF)
        self.prior = np.where(self._is_exposed, at_scale, 0.0)
        """Probability of each layout before any was measured."""

    def probability(self, rows: Ints, measured: Ints, slowed: Floats) -> Floats:
        """Probability that some layouts stall.

        Of the measured layouts, one that ran twice is there twice; `slowed` says how likely each of
        those runs was slowed down.
        """
        exposed = self._is_exposed[measured]
        guess = _GUESS_WEIGHT * self.prior[rows]
        return (
            np.asarray((guess + slowed[exposed].sum()) / (_GUESS_WEIGHT + exposed.sum()))
            * (self._is_exposed[rows])
        )

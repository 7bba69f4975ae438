"""Layouts that are computed once, since a block or a peak is the same for all that share them."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from layout_tuner.array_types import Ints
from layout_tuner.predictions.estimates.distinct_rows import distinct
from layout_tuner.predictions.estimates.peak_memory import most_held
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns

_PEAK_KNOBS: Final = (
    *(set(LAYOUT_FIELDS) - {"num_nodes", "rank_order", "num_microbatches"}),
    *("job", "num_microbatches"),
)
"""What a peak depends on; last what varies along the second axis of a tile."""


def distinct_peaks(columns: LayoutColumns, *, always_shards: bool) -> tuple[LayoutColumns, Ints]:
    """Layouts of a tile whose peaks may differ, along one axis, and the place of each among them.

    Without ZeRO no replica shards anything, unless the trainer `always_shards`. The places have the
    shape of the tile.
    """
    held = np.broadcast_to(np.minimum(columns.num_microbatches, most_held(columns)), columns.shape)
    dp = columns.dp if always_shards else np.where(columns.zero_stage == 0, 1, columns.dp)
    alike = replace(columns, dp=dp, num_microbatches=held)
    places, examples = distinct(alike, _PEAK_KNOBS)
    # A single column where the number of micro-batches changes no peak.
    rows, numbers = np.divmod(examples, places.shape[1])
    few = replace(alike.firsts().rows(rows), num_microbatches=held[rows, numbers])
    return few, np.broadcast_to(places, held.shape)

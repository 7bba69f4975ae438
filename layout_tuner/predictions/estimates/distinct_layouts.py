"""Layouts that are computed once, since a block or a peak is the same for all that share them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import numpy as np

from layout_tuner.array_types import Ints
from layout_tuner.predictions.estimates.peak_memory import most_held
from layout_tuner.search_spaces.layouts.layout import KNOBS, LAYOUT_FIELDS
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns

_PEAK_KNOBS: Final = (
    *(set(LAYOUT_FIELDS) - {"num_nodes", "rank_order", "num_microbatches"}),
    *("job", "num_microbatches"),
)
"""What a peak depends on; last what varies along the second axis of a tile."""

_MOST_CODES: Final = 1 << 16
"""Codes of combinations up to which a table of all of them stays in the cache."""


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


def different(values: Ints) -> Ints:
    """The different values, ascending. numpy's own function loads `numpy.ma`, of 6 MB and 50 ms."""
    ordered = np.sort(values, axis=None)
    return np.append(ordered[:1], ordered[1:][ordered[1:] != ordered[:-1]])


def distinct(columns: LayoutColumns, knobs: Iterable[str]) -> tuple[Ints, Ints]:
    """The combination of some knobs of each layout, numbered from 0, and one layout of each."""
    codes, count = np.zeros(columns.tp.shape, dtype=np.int64), 1
    for name in knobs:
        values = getattr(columns, name)
        if columns.texts and name in KNOBS and KNOBS[name].is_text:  # its codes are far apart
            values = np.searchsorted(different(values), values)
        low = int(values.min())
        span = int(values.max()) - low + 1
        if span > _MOST_CODES:  # codes of free texts
            known = different(values)
            values, low, span = np.searchsorted(known, values), 0, known.size
        if count * span > _MOST_CODES:
            codes, count = _ranked(codes, count)
        if span > 1:
            codes, count = codes * span + (values - low), count * span
    codes, count = _ranked(codes, count)
    examples = np.empty(count, dtype=np.int64)
    examples[codes] = np.arange(codes.size).reshape(codes.shape)
    return codes, examples


def _ranked(codes: Ints, count: int) -> tuple[Ints, int]:
    """The codes, which are below `count`, by their rank among those that occur; how many do."""
    if count > 16 * _MOST_CODES:
        found, ranks = np.unique(codes, return_inverse=True)
        return ranks, found.size
    occurs = np.zeros(count, dtype=bool)
    occurs[codes] = True
    ranks = np.cumsum(occurs) - 1
    return ranks[codes], int(ranks[-1]) + 1

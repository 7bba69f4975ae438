"""Rows of columns that differ in some knobs, and one row for all that do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from layout_tuner.array_types import Ints
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns

_MOST_CODES: Final = 1 << 16
"""Codes of combinations up to which a table of all of them stays in the cache."""


def different(values: Ints) -> Ints:
    """The different values, ascending. numpy's own function loads `numpy.ma`, of 6 MB and 50 ms."""
    ordered = np.sort(values, axis=None)
    return np.append(ordered[:1], ordered[1:][ordered[1:] != ordered[:-1]])


def distinct(columns: LayoutColumns, knobs: Iterable[str]) -> tuple[Ints, Ints]:
    """The combination of some knobs of each layout, numbered from 0, and one layout of each."""
    codes, count = np.zeros(columns.tp.shape, dtype=np.int64), 1
    for name in knobs:
        values = getattr(columns, name)
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

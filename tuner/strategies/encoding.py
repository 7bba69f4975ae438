"""Layouts as points: each knob's value becomes its rank among the values that occur."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from search_spaces.layout import LAYOUT_FIELDS
from tuner.strategies.base import LayoutSet

_LARGEST_SHORT: Final = np.iinfo(np.int16).max


class KnobRanks:
    """The legal set as small whole numbers: one a layout and knob that varies.

    Ranks rather than values: the degrees are powers of two mostly, and a surrogate that cuts an
    axis at a uniformly drawn place would never tell 1 from 2 on an axis that ends at 512.
    """

    def __init__(self, layouts: LayoutSet) -> None:
        # One knob at a time: all the columns of millions of layouts would be hundreds of megabytes.
        varying = {}
        for name in sorted(LAYOUT_FIELDS):
            ranks = _ranks(layouts.column(name))
            if ranks.max(initial=0) > 0:
                varying[name] = ranks
        self.names = tuple(varying)
        """Knobs that take more than one value, in alphabetical order."""
        self._columns = tuple(varying.values())
        self.num_values = tuple(int(ranks.max()) + 1 for ranks in self._columns)
        """How many values each knob takes."""
        self._num_layouts = len(layouts)

    def rows(self, indices: NDArray[np.int64]) -> NDArray[np.int32]:
        """Ranks of some layouts, by layout and knob."""
        rows = np.empty((len(indices), len(self.names)), dtype=np.int32)
        for place, ranks in enumerate(self._columns):
            rows[:, place] = ranks[indices]
        return rows

    def steps_from(self, index: int) -> NDArray[np.int32]:
        """How many steps of a rank lie between one layout and each."""
        steps = np.zeros(self._num_layouts, dtype=np.int32)
        for ranks in self._columns:
            steps += np.abs(ranks - ranks[index])
        return steps


def _ranks(values: NDArray[np.int64]) -> NDArray[np.signedinteger[Any]]:
    """Ranks by a table of all values up to the largest: no value is over 2^20, and nothing is sorted."""
    occurs = np.zeros(int(values.max(initial=0)) + 1, dtype=np.bool_)
    occurs[values] = True
    num_values = int(np.count_nonzero(occurs))
    short: type[np.signedinteger[Any]] = np.int16 if num_values <= _LARGEST_SHORT else np.int32
    rank_of = (np.cumsum(occurs) - 1).astype(short)
    return rank_of[values]

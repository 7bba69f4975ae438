"""Layouts as points: each knob's value becomes its rank among the values that occur."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from search_spaces.layout import LAYOUT_FIELDS, PRECISIONS, RECOMPUTE_MODES
from tuner.strategies.base import LayoutSet

_WORD_ORDER: Final[dict[str, int]] = {
    word: rank for words in (RECOMPUTE_MODES, PRECISIONS) for rank, word in enumerate(words)
}
"""Words in the order of the memory that they save, so that neighbours are alike."""


class KnobRanks:
    """The legal set as small whole numbers: a row a layout, a column a knob that varies.

    Ranks rather than values: the degrees are powers of two mostly, and a surrogate that cuts an
    axis at a uniformly drawn place would never tell 1 from 2 on an axis that ends at 512.
    """

    def __init__(self, layouts: LayoutSet) -> None:
        columns = layouts.columns
        ranked = {name: _ranks(columns[name]) for name in LAYOUT_FIELDS if name in columns}
        varying = {name: ranks for name, ranks in ranked.items() if ranks.max(initial=0) > 0}
        self.names = tuple(sorted(varying))
        """Knobs that take more than one value, in alphabetical order."""
        self.table: NDArray[np.int16] = np.empty((len(layouts), len(varying)), dtype=np.int16)
        """Ranks, by layout and knob."""
        for column, name in enumerate(self.names):
            self.table[:, column] = varying[name]
        self.num_values = tuple(int(ranks.max()) + 1 for ranks in self.table.T)
        """How many values each knob takes."""

    def steps_from(self, index: int, among: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many steps of a rank lie between one layout and each of the others."""
        difference = self.table[among] - self.table[index]
        steps: NDArray[np.int64] = np.abs(difference).sum(axis=1, dtype=np.int64)
        return steps


def _ranks(values: NDArray[Any]) -> NDArray[np.int16]:
    distinct, ranks = np.unique(values, return_inverse=True)
    order = sorted(range(len(distinct)), key=lambda i: _sort_key(distinct[i]))
    position = np.empty(len(distinct), dtype=np.int16)
    position[order] = np.arange(len(distinct), dtype=np.int16)
    return position[ranks.reshape(-1)]


def _sort_key(value: Any) -> float:
    return float(_WORD_ORDER[value]) if isinstance(value, str) else float(value)

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
        self._columns = tuple(varying[name] for name in self.names)
        shape = (len(layouts), len(self.names))
        self.table: NDArray[np.int32] = (
            np.stack(self._columns, axis=1) if varying else np.empty(shape, dtype=np.int32)
        )
        """Ranks, by layout and knob."""
        self.num_values = tuple(int(ranks.max()) + 1 for ranks in self._columns)
        """How many values each knob takes."""

    def steps_from(self, index: int) -> NDArray[np.int32]:
        """How many steps of a rank lie between one layout and each."""
        steps = np.zeros(len(self.table), dtype=np.int32)
        for ranks in self._columns:
            steps += np.abs(ranks - ranks[index])
        return steps


def _ranks(values: NDArray[Any]) -> NDArray[np.int32]:
    distinct, ranks = np.unique(values, return_inverse=True)
    order = sorted(range(len(distinct)), key=lambda i: _sort_key(distinct[i]))
    position = np.empty(len(distinct), dtype=np.int32)
    position[order] = np.arange(len(distinct), dtype=np.int32)
    return position[ranks.reshape(-1)]


def _sort_key(value: Any) -> float:
    return float(_WORD_ORDER[value]) if isinstance(value, str) else float(value)

"""The two strategies that learn nothing: a seeded shuffle, and the canonical order."""

from __future__ import annotations

import numpy as np

from tuner.strategies.base import History


class RandomProposer:
    """Every layout once, in an order that the seed decides: the baseline to beat."""

    def __init__(self, *, num_layouts: int, seed: int) -> None:
        self._order = np.random.default_rng(seed).permutation(num_layouts)
        self._next = 0

    def propose(self, history: History) -> int:
        """The first of the order that is free; what is taken stays so, hence no look back."""
        while not history.is_free[self._order[self._next]]:
            self._next += 1
        return int(self._order[self._next])


class ExhaustiveProposer:
    """Every layout once, in the canonical order."""

    def __init__(self) -> None:
        self._next = 0

    def propose(self, history: History) -> int:
        """The first free one."""
        while not history.is_free[self._next]:
            self._next += 1
        return self._next

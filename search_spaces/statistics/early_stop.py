"""When a probe has shown enough: it is slower than the best layout, whatever its last iterations say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from search_spaces.confidence import CONFIDENCE, is_slower

LEAST_TIMED: Final = 3
"""Timed iterations before the first look: on recorded campaigns, fewer lost up to 7 % of the result."""


def shows_enough(step_times_s: Sequence[float], than_s: float) -> bool:
    """Whether to stop after these timed iterations, all that there are so far.

    One looks again after every iteration, and each look could err. Look k (the first is at
    `LEAST_TIMED`) may err with probability 5 % / (k (k + 1)), which adds up to 5 % over all looks,
    however many there are and however much they depend on each other (the union bound; spending the
    error over looks is Lan and DeMets 1983). Most is spent on the first looks: those save most.

    Args:
        step_times_s: of the timed iterations, in order.
        than_s: the step time at which the layout would be as good as the best one.
    """
    look = len(step_times_s) - LEAST_TIMED + 1
    if look < 1:
        return False
    may_err = (1.0 - CONFIDENCE) / (look * (look + 1))
    return is_slower(step_times_s, than_s, confidence=1.0 - may_err)

"""Early stop of a probe that is certainly slower than the best layout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from layout_tuner.predictions.statistics.confidence import CONFIDENCE, is_slower

LEAST_TIMED: Final = 3
"""Timed iterations before the first test; with fewer, recorded campaigns lost up to 7 %."""


def shows_enough(step_times_s: Sequence[float], than_s: float) -> bool:
    """Whether to stop a probe after the timed iterations so far.

    The test is repeated after every iteration, and each test may err. Test k (the first is at
    `LEAST_TIMED`) errs with a probability of at most 5 % / (k (k + 1)), which sums to 5 % over all
    tests, whatever their number and dependence (union bound; error spending: Lan and DeMets 1983).
    Most of the error is spent on the first tests, which save most.

    At the step time `than_s` the layout would be as good as the best one.
    """
    look = len(step_times_s) - LEAST_TIMED + 1
    if look < 1:
        return False
    may_err = (1.0 - CONFIDENCE) / (look * (look + 1))
    return is_slower(step_times_s, than_s, confidence=1.0 - may_err)

"""Step times of a probe: when warm-up has ended, and quartiles."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Final

MIN_WARMUP: Final = 2
"""The first iteration allocates and compiles, the second still meets cold caches."""
MAX_EXTRA_WARMUP: Final = 8
"""Largest number of warm-up steps beyond the requested ones, while step times have not settled."""
SETTLED_WITHIN: Final = 0.1
"""Step times have settled when two in a row differ by at most this fraction of the shorter one."""


def has_settled(step_times_s: Sequence[float]) -> bool:
    """Whether the last two steps took the same time, within `SETTLED_WITHIN`.

    The last step is compared with the one before, not with the shortest so far: a step that is the
    shortest so far does not show whether the next one will be shorter.
    """
    if len(step_times_s) < MIN_WARMUP:  # two steps are needed for a comparison
        return False
    before_s, last_s = step_times_s[-2:]
    return abs(last_s - before_s) <= SETTLED_WITHIN * min(before_s, last_s)


def is_warm(step_times_s: Sequence[float], *, at_least: int) -> bool:
    """Whether warm-up ends: step times have settled, or `MAX_EXTRA_WARMUP` extra steps are done.

    Step times are those of the slowest rank, so every rank decides the same.
    """
    if len(step_times_s) < at_least:
        return False
    return has_settled(step_times_s) or len(step_times_s) >= at_least + MAX_EXTRA_WARMUP


def num_warmup(
    step_times_s: Sequence[float], *, at_least: int, ends: Sequence[int] | None = None
) -> int | None:
    """Steps of warm-up; None: it has not ended.

    `ends` are numbers of steps after which it may end, in order, where steps are measured several
    at a time; the steps between two of them count as one. None: after every step.
    """
    counts = range(1, len(step_times_s) + 1) if ends is None else ends
    means_s: list[float] = []
    for end in counts:
        means_s.append(step_times_s[end - 1])
        may_end = has_settled(means_s) or end >= at_least + MAX_EXTRA_WARMUP
        if end >= at_least and may_end:
            return end
    return None


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The three quartiles, interpolated between values; a single value is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    q25, q50, q75 = statistics.quantiles(values, n=4, method="inclusive")
    return q25, q50, q75

"""Confidence intervals and tests of step times, with the standard library alone.

The trainer, the store and the search share this definition of a significant difference. Step times
are compared by their logarithms, because noise is multiplicative and skewed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median, variance
from typing import Final

CONFIDENCE: Final = 0.95
"""Confidence of all intervals and tests."""

MAX_DOF: Final = 400
"""Largest number of degrees of freedom: its quantiles are 0.1 % above the normal ones."""


def student_tail(t: float, dof: int) -> float:
    """P(T > t) of Student's t.

    The finite sums for whole degrees of freedom (Abramowitz and Stegun 1964, 26.7.3 and 26.7.4).
    """
    dof = min(dof, MAX_DOF)
    angle = math.atan2(abs(t), math.sqrt(dof))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = dof % 2
    term = cosine if is_odd else 1.0
    total = term if dof > 1 else 0.0
    for factor in range(2 + is_odd, dof - 1, 2):
        term *= cosine * cosine * (factor - 1) / factor
        total += term
    within = 2 / math.pi * (angle + sine * total) if is_odd else sine * total
    tail = max(0.5 * (1.0 - within), 0.0)
    return tail if t >= 0 else 1.0 - tail


@lru_cache(maxsize=1024)
def student_quantile(probability: float, dof: int) -> float:
    """The quantile of Student's t for a probability from 0.5 to less than 1."""
    low, high = 0.0, 1.0
    while student_tail(high, dof) > 1.0 - probability:
        high *= 2.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        if student_tail(middle, dof) > 1.0 - probability:
            low = middle
        else:
            high = middle
    return high


def is_slower(
    step_times_s: Sequence[float], than_s: float, *, confidence: float = CONFIDENCE
) -> bool:
    """Whether step times are slower than a known one, by a one-sided t-test on their logarithms.

    Their median has to be slower too: a few slow iterations affect the mean, but ranking uses the
    median.
    """
    logs = [math.log(seconds) - math.log(than_s) for seconds in step_times_s]
    excess, error = fmean(logs), math.sqrt(variance(logs) / len(logs))
    if excess <= 0 or median(logs) <= 0:
        return False
    return error == 0 or student_tail(excess / error, len(logs) - 1) <= 1.0 - confidence


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure that varies from run to run, a step time or a rate, with its 95 % interval."""

    log: float
    """Its natural logarithm."""
    reach: float
    """Half of the interval of the logarithm."""


def reach_of_ratio(one: Estimate, other: Estimate) -> float:
    """Half of the 95 % interval of the logarithm of the ratio of two figures.

    Errors of the same distribution add by their squares, and so do their quantiles.
    """
    return math.hypot(one.reach, other.reach)


def can_be_told_apart(one: Estimate, other: Estimate) -> bool:
    """Whether two figures differ with 95 % confidence."""
    return abs(one.log - other.log) > reach_of_ratio(one, other)

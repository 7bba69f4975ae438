"""Confidence intervals and tests of step times: Student's t, with the standard library alone.

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


_NEAR: Final = 1.95
"""A smaller distance in standard errors is never significant: 1.966 is the quantile of
`MAX_DOF`."""
_FAR: Final = 12.71
"""A larger distance is always significant: 12.706 is the quantile of one degree of freedom."""


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
    """A step time and its standard error."""

    log_s: float
    """Logarithm of the seconds."""
    error: float
    """Standard error of the logarithm, which is the relative error of the step time."""
    dof: int
    """Degrees of freedom of the error."""

    @property
    def factor(self) -> float:
        """The interval is from the step time divided by this factor to the step time times it."""
        reach = student_quantile(0.5 + CONFIDENCE / 2, self.dof) * self.error
        return math.exp(min(reach, 50.0))


def ratio_factor(one: Estimate, other: Estimate) -> float:
    """The 95 % interval of the ratio of two step times, as a factor (Welch 1947).

    It is from the ratio divided by the factor to the ratio times it.
    """
    error = math.hypot(one.error, other.error)
    if error == 0:
        return 1.0
    return Estimate(log_s=0.0, error=error, dof=_dof_of_difference(one, other)).factor


def can_be_told_apart(one: Estimate, other: Estimate) -> bool:
    """Whether two step times differ with 95 % confidence (Welch 1947, two-sided)."""
    error = math.hypot(one.error, other.error)
    distance = abs(one.log_s - other.log_s)
    if error == 0:
        return distance > 0
    # A shortcut without degrees of freedom: most layouts of a leaderboard are far from the first.
    if not _NEAR < distance / error < _FAR:
        return distance / error >= _FAR
    tail = student_tail(distance / error, _dof_of_difference(one, other))
    return 2 * tail <= 1.0 - CONFIDENCE


def _dof_of_difference(one: Estimate, other: Estimate) -> int:
    """Degrees of freedom of a difference, whose errors are not both 0 (Welch 1947)."""
    parts = one.error**4 / one.dof + other.error**4 / other.dof
    return max(int(math.hypot(one.error, other.error) ** 4 / parts), 1)

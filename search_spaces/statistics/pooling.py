"""The step time of a layout from several runs, and its error.

The step time of a run is the median of its timed iterations; that of a layout is the median of its
runs. The iterations of one run share its conditions (nodes, neighbours, temperature), so an error
from them alone is too small. Once layouts were run more than once, the spread between runs of one
layout is known too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from search_spaces.statistics.confidence import Estimate

MEDIAN_VARIANCE: Final = math.pi / 2
"""Variance of a median over that of a mean, for many normal values; for few it is a little less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The spread between runs of one layout, pooled over layouts with several runs."""

    log_variance: float
    """Variance of the logarithm of a run's step time."""
    dof: int
    """Degrees of freedom: runs minus layouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledRuns:
    """The runs of one layout, as far as the estimate of its step time needs them."""

    log_s: float
    """Logarithm of the median of the runs' step times."""
    num_runs: int
    variance: float | None
    """Variance of the logarithm of a run's step time, from its iterations; None if a run has only
    one."""
    dof: int
    """Degrees of freedom: iterations minus runs."""

    @classmethod
    def of(cls, runs: Sequence[Sequence[float]]) -> PooledRuns:
        """Pools the timed iterations of each run."""
        variance_of_runs = None
        if min(len(run) for run in runs) > 1:
            variance_of_runs = fmean(
                MEDIAN_VARIANCE * _log_variance(run) / len(run) for run in runs
            )
        return cls(
            log_s=math.log(median(median(run) for run in runs)),
            num_runs=len(runs),
            variance=variance_of_runs,
            dof=sum(len(run) - 1 for run in runs),
        )

    def estimate(self, spread: Spread | None) -> Estimate | None:
        """The layout's step time and its error; None where there is only one iteration.

        The error is the larger of two: from the iterations within runs, and from the spread of
        runs.

        Args:
            spread: the spread between runs; None while no layout was run twice.
        """
        of_median = MEDIAN_VARIANCE if self.num_runs > 2 else 1.0
        errors = []
        if self.variance is not None:
            errors.append((of_median * self.variance / self.num_runs, self.dof))
        if spread is not None:
            errors.append((of_median * spread.log_variance / self.num_runs, spread.dof))
        if not errors:
            return None
        worse, dof = max(errors)
        return Estimate(log_s=self.log_s, error=math.sqrt(worse), dof=dof)


def squares_of_runs(step_times_s: Sequence[float]) -> float:
    """Sum of squared deviations of the runs of one layout, in logarithms of the step time."""
    if len(step_times_s) < 2:
        return 0.0
    return (len(step_times_s) - 1) * _log_variance(step_times_s)


def _log_variance(seconds: Sequence[float]) -> float:
    """Sample variance of the logarithms; `statistics.variance` is a hundred times slower."""
    logs = [math.log(one) for one in seconds]
    # Relative to one of them: equal values give exactly 0, and close values keep their digits.
    offs = [log - logs[0] for log in logs]
    mean = math.fsum(offs) / len(offs)
    return math.fsum((off - mean) ** 2 for off in offs) / (len(offs) - 1)


def spread_of_squares(layouts: Iterable[tuple[float, int]]) -> Spread | None:
    """The pooled spread within layouts, each with its own step time.

    Args:
        layouts: `squares_of_runs` and the number of runs of each layout.
    """
    squares, dof = 0.0, 0
    for of_layout, num_runs in layouts:
        squares += of_layout
        dof += max(num_runs - 1, 0)
    return Spread(log_variance=squares / dof, dof=dof) if dof else None

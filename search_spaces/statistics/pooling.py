"""Several runs of one layout as one step time, and how sure it is.

A run's figure is the median of its timed iterations, a layout's the median of its runs. Iterations of one
run share whatever was odd about that run (the nodes, the neighbours, the clock's temperature), so that
they alone promise too much; once layouts were run again, how far runs of one layout lie apart is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from search_spaces.confidence import Estimate

MEDIAN_VARIANCE: Final = math.pi / 2
"""Variance of a median over that of a mean, of many normal values; for few it is a little less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """How far runs of one layout lie apart, over all layouts that were run more than once."""

    log_variance: float
    """Variance of the logarithm of a run's step time."""
    dof: int
    """Runs less layouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledRuns:
    """The runs of one layout, as far as an estimate of its step time looks at them."""

    log_s: float
    """Logarithm of the median of the runs' step times."""
    num_runs: int
    variance: float | None
    """Of the logarithm of a run's step time, from its iterations; None where a run has a single one."""
    dof: int
    """Iterations less runs."""

    @classmethod
    def of(cls, runs: Sequence[Sequence[float]]) -> PooledRuns:
        """Pools the timed iterations of each run."""
        variance_of_runs = None
        if min(len(run) for run in runs) > 1:
            variance_of_runs = fmean(
                MEDIAN_VARIANCE * _log_variance(run) / len(run) for run in runs
            )
        return cls(
            log_s=math.log(pooled_step_time_s([median(run) for run in runs])),
            num_runs=len(runs),
            variance=variance_of_runs,
            dof=sum(len(run) - 1 for run in runs),
        )

    def estimate(self, spread: Spread | None) -> Estimate | None:
        """The layout's step time and how sure it is; None where a single iteration is all there is.

        The error is the larger one of two: from the iterations within runs, and from the spread of runs.

        Args:
            spread: how far runs lie apart; None while no layout was run twice.
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
    """Squared distances of the runs of one layout from their mean, in logarithms of the step time."""
    if len(step_times_s) < 2:
        return 0.0
    return (len(step_times_s) - 1) * _log_variance(step_times_s)


def _log_variance(seconds: Sequence[float]) -> float:
    """Sample variance of the logarithms; `statistics.variance` adds fractions, a hundred times slower."""
    logs = [math.log(one) for one in seconds]
    # Measured from one of them: equal ones have no variance at all, and close ones all of their digits.
    offs = [log - logs[0] for log in logs]
    mean = math.fsum(offs) / len(offs)
    return math.fsum((off - mean) ** 2 for off in offs) / (len(offs) - 1)


def spread_of_squares(layouts: Iterable[tuple[float, int]]) -> Spread | None:
    """The spread within layouts, pooled: each is allowed a step time of its own.

    Args:
        layouts: `squares_of_runs` of each layout, and how many runs it has.
    """
    squares, dof = 0.0, 0
    for of_layout, num_runs in layouts:
        squares += of_layout
        dof += max(num_runs - 1, 0)
    return Spread(log_variance=squares / dof, dof=dof) if dof else None


def spread_of_runs(layouts: Iterable[Sequence[float]]) -> Spread | None:
    """The spread within layouts, from the step times of each layout's runs."""
    return spread_of_squares((squares_of_runs(runs), len(runs)) for runs in layouts)


def pooled_step_time_s(step_times_s: Sequence[float]) -> float:
    """The step time of a layout from those of its runs."""
    return median(step_times_s)


def pooled_estimate(runs: Sequence[Sequence[float]], spread: Spread | None) -> Estimate | None:
    """A layout's step time and how sure it is, from the timed iterations of each of its runs."""
    return PooledRuns.of(runs).estimate(spread)

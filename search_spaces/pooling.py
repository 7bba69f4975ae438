"""Several runs of one layout as one step time, and how sure it is.

A run's figure is the median of its timed iterations, a layout's the median of its runs. Iterations of one
run share whatever was odd about that run (the nodes, the neighbours, the clock's temperature), so that
they alone promise too much; once layouts were run again, how far runs of one layout lie apart is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance
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


def spread_of_runs(layouts: Iterable[Sequence[float]]) -> Spread | None:
    """The spread within layouts, pooled: each is allowed a step time of its own.

    Args:
        layouts: the step times of each layout's runs.
    """
    squares, dof = 0.0, 0
    for step_times_s in layouts:
        logs = [math.log(seconds) for seconds in step_times_s]
        squares += (len(logs) - 1) * variance(logs) if len(logs) > 1 else 0.0
        dof += max(len(logs) - 1, 0)
    return Spread(log_variance=squares / dof, dof=dof) if dof else None


def pooled_step_time_s(step_times_s: Sequence[float]) -> float:
    """The step time of a layout from those of its runs."""
    return median(step_times_s)


def pooled_estimate(runs: Sequence[Sequence[float]], spread: Spread | None) -> Estimate | None:
    """A layout's step time and how sure it is; None where a single iteration is all there is.

    The error is the larger one of two: from the iterations within runs, and from the spread of runs.

    Args:
        runs: the timed iterations of each run of the layout.
        spread: how far runs lie apart; None while no layout was run twice.
    """
    log_s = math.log(pooled_step_time_s([median(run) for run in runs]))
    of_median = MEDIAN_VARIANCE if len(runs) > 2 else 1.0
    errors = []
    dof = sum(len(run) - 1 for run in runs)
    if min(len(run) for run in runs) > 1:
        within = fmean(
            MEDIAN_VARIANCE * variance([math.log(seconds) for seconds in run]) / len(run)
            for run in runs
        )
        errors.append((of_median * within / len(runs), dof))
    if spread is not None:
        errors.append((of_median * spread.log_variance / len(runs), spread.dof))
    if not errors:
        return None
    worse, dof = max(errors)
    return Estimate(log_s=log_s, error=math.sqrt(worse), dof=dof)

"""The error of a layout's step time from its runs.

The step time of a run is the median of its timed iterations; that of a layout is the median of its
runs. The iterations of one run share its conditions (nodes, neighbours, temperature), so an error
from them alone is too small: the spread between runs counts too, known or assumed (`run_spread`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Final

from layout_tuner.predictions.statistics.confidence import CONFIDENCE, student_quantile
from layout_tuner.predictions.statistics.run_spread import RunSpread

MEDIAN_VARIANCE: Final = math.pi / 2
"""Variance of a median over that of a mean, for many normal values; for few it is a little less."""


_FARTHEST: Final = 50.0
"""Beyond it exponentials overflow; an interval of 22 orders of magnitude says nothing anyway."""


def variance_factor(num_runs: int) -> float:
    """The variance of the median of runs, over that of one run; that of two is their mean."""
    return (MEDIAN_VARIANCE if num_runs > 2 else 1.0) / num_runs


def pooled_reach(runs: Sequence[Sequence[float]], spread: RunSpread) -> float:
    """Half of the 95 % interval of the logarithm of a layout's step time.

    The largest of up to three: from the spread between runs; from the iterations within runs, by
    Student's t; and of two runs half of their distance, since either may be the disturbed one and
    nothing tells which.
    """
    reaches = [math.sqrt(variance_factor(len(runs))) * spread.reach, reach_within(runs)]
    if len(runs) == 2:
        one, other = map(median, runs)
        reaches.append(abs(math.log(one / other)) / 2)
    return min(max(reaches), _FARTHEST)


def reach_within(runs: Sequence[Sequence[float]]) -> float:
    """Half of the 95 % interval of the logarithm by the iterations alone; 0 where a run has one."""
    if min(len(run) for run in runs) < 2:
        return 0.0
    of_run = fmean(MEDIAN_VARIANCE * _log_variance(run) / len(run) for run in runs)
    dof = sum(len(run) - 1 for run in runs)
    quantile = student_quantile(0.5 + CONFIDENCE / 2, dof)
    return quantile * math.sqrt(variance_factor(len(runs)) * of_run)


def _log_variance(seconds: Sequence[float]) -> float:
    """Sample variance of the logarithms; `statistics.variance` is a hundred times slower."""
    logs = [math.log(one) for one in seconds]
    # Relative to one of them: equal values give exactly 0, and close values keep their digits.
    offs = [log - logs[0] for log in logs]
    mean = math.fsum(offs) / len(offs)
    return math.fsum((off - mean) ** 2 for off in offs) / (len(offs) - 1)

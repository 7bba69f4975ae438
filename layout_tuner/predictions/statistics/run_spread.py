"""How far the runs of one layout differ: a prior, updated by layouts that were run more than once.

A run shares its nodes, neighbours and temperature among all of its iterations. How far runs differ
is therefore known only from repeats, and a campaign has few. The standard deviation of the
logarithm of a run's step time is a distribution on a grid: it starts as a prior, and each layout
with several runs updates it. One run of each layout may have been disturbed without being marked.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from layout_tuner.predictions.statistics.confidence import CONFIDENCE

PRIOR_MEDIAN: Final = 0.04
"""Median of the standard deviation between runs before any layout was repeated.

Sinha et al. (SC 2022, arXiv 2208.11035) ran the same work on the GPUs of five large systems: 8 %
from the fastest to the slowest on average, 22 % at most. 8 % are two standard deviations of 4 %."""
PRIOR_LOG_SD: Final = 0.8
"""Standard deviation of the logarithm of that: with 95 % it is between 0.8 and 19 %."""
UNNOTICED_SHARE: Final = 0.05
"""Probability that a run was disturbed and is not marked as such."""
DISTURBED_SD: Final = 0.3
"""How far a disturbed run is off, as a standard deviation; the outliers of the same study were up
to 1.5 times slower than the median."""
MOST_LAYOUTS: Final = 200
"""Layouts with repeats that are looked at; more of them add nothing."""

_GRID: Final = np.geomspace(0.002, 0.4, 24)
_FARTHEST: Final = 4.0
"""Bisection starts here: no quantile of the grid's normal distributions is larger."""


@dataclass(frozen=True, eq=False)
class RunSpread:
    """What is known of the standard deviation between runs, which is the same for all layouts."""

    logs: NDArray[np.float64]
    """Logarithm of the probability of each standard deviation on the grid, up to a constant; runs
    that scatter widely leave small ones a probability below the smallest number."""

    @classmethod
    def prior(cls) -> Self:
        """Before any layout was run twice: log-normal."""
        return cls(-0.5 * (np.log(_GRID / PRIOR_MEDIAN) / PRIOR_LOG_SD) ** 2)

    def updated(self, layouts: Iterable[Sequence[float]]) -> RunSpread:
        """The distribution after some layouts.

        Step times are in seconds. Layouts with one run are ignored. The first `MOST_LAYOUTS` of
        the others count.
        """
        by_number: defaultdict[int, list[Sequence[float]]] = defaultdict(list)
        left = MOST_LAYOUTS
        for runs in layouts:
            if len(runs) > 1 and left:
                by_number[len(runs)].append(runs)
                left -= 1
        if not by_number:
            return self
        likelihoods = (_log_likelihood(np.log(np.array(runs))) for runs in by_number.values())
        return RunSpread(sum(likelihoods, self.logs))

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        """Probability of each standard deviation on the grid."""
        weights = np.exp(self.logs - self.logs.max())
        return np.asarray(weights / weights.sum(), dtype=np.float64)

    @cached_property
    def variance(self) -> float:
        """The expected variance of the logarithm of a run's step time."""
        return float(self.weights @ _GRID**2)

    @cached_property
    def reach(self) -> float:
        """Half of the 95 % interval of the logarithm of one run's step time."""
        within, weights = 0.5 + CONFIDENCE / 2, self.weights.tolist()
        low, high = 0.0, _FARTHEST
        for _ in range(55):
            middle = 0.5 * (low + high)
            below = (0.5 + 0.5 * math.erf(middle / sd / math.sqrt(2)) for sd in _GRID.tolist())
            if math.fsum(w * p for w, p in zip(weights, below, strict=True)) < within:
                low = middle
            else:
                high = middle
        return high


def _log_likelihood(logs: NDArray[np.float64]) -> NDArray[np.float64]:
    """The log likelihood of each standard deviation of the grid, up to a constant.

    A layout's runs are normal around its own step time, about which nothing is known, and at most
    one of them is disturbed.

    `logs` are logarithms of step times, of shape (layouts, runs).
    """
    num_runs = logs.shape[1]
    disturbed = np.vstack([np.zeros(num_runs), np.eye(num_runs)])  # cases x runs
    variance = _GRID[:, None, None] ** 2 + DISTURBED_SD**2 * disturbed
    total = (1.0 / variance).sum(-1)
    runs = logs[:, None, None, :]
    mean = (runs / variance).sum(-1) / total
    squares = ((runs - mean[..., None]) ** 2 / variance).sum(-1)
    of_case = np.where(disturbed.any(-1), UNNOTICED_SHARE, 1.0 - UNNOTICED_SHARE)
    density = np.log(of_case) - 0.5 * (np.log(variance).sum(-1) + np.log(total) + squares)
    return np.asarray(np.logaddexp.reduce(density, axis=-1).sum(axis=0), dtype=np.float64)

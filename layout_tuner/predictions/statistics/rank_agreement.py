"""How well two trainers agree about the order of some layouts: Kendall's tau with ties."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from layout_tuner.predictions.statistics.confidence import CONFIDENCE

_RESAMPLES: Final = 10_000
_SEED: Final = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredValue:
    """A figure with its 95 % interval; more is better."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAgreement:
    """Kendall's tau of two orders, from -1 (reversed) to 1 (the same)."""

    tau: float | None
    """None: no two layouts are told apart by both."""
    low: float | None
    """Lower end of the 95 % interval of tau; None: it could not be computed."""
    high: float | None
    num_layouts: int
    times_the_runs: float | None
    """How many times as many runs of each layout would tell half of the pairs apart in both, if
    intervals narrow by the square root; None: half of the pairs or more are equal."""


def order_of(one: MeasuredValue, other: MeasuredValue) -> int:
    """1 where the first is better, -1 where it is worse, 0 where their intervals overlap."""
    if one.low > other.high:
        return 1
    return -1 if one.high < other.low else 0


def rank_agreement(
    first: Sequence[MeasuredValue], second: Sequence[MeasuredValue]
) -> RankAgreement:
    """Kendall's tau-b (Kendall 1945) of the same layouts, in the same order, in two trainers.

    Layouts whose intervals overlap are tied. The interval is that of a bootstrap over the layouts
    (percentiles of 10,000 samples with replacement): another sample of the leaderboard could have
    given another tau.
    """
    pairs = list(combinations(range(len(first)), 2))
    orders = np.array(
        [(order_of(first[a], first[b]), order_of(second[a], second[b])) for a, b in pairs]
    ).reshape(-1, 2)
    tau = _tau(orders, np.ones(len(pairs)))
    taus = []
    random = np.random.default_rng(_SEED)
    a, b = (np.array([pair[side] for pair in pairs], dtype=np.int64) for side in (0, 1))
    for _ in range(_RESAMPLES if tau is not None else 0):
        times = np.bincount(random.integers(len(first), size=len(first)), minlength=len(first))
        resampled = _tau(orders, times[a] * times[b])
        if resampled is not None:
            taus.append(resampled)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(taus, (tail, 1 - tail)) if taus else (None, None)
    times_the_runs = median(
        max(_times_the_runs(side[a], side[b]) for side in (first, second)) for a, b in pairs
    )
    return RankAgreement(
        tau=tau,
        low=None if low is None else float(low),
        high=None if high is None else float(high),
        num_layouts=len(first),
        times_the_runs=None if math.isinf(times_the_runs) else times_the_runs,
    )


def _times_the_runs(one: MeasuredValue, other: MeasuredValue) -> float:
    """How many times as many runs would tell two layouts apart; may be less than 1."""
    if one.value == other.value:
        return math.inf
    reach = (math.log(one.high / one.low) + math.log(other.high / other.low)) / 2
    return (reach / math.log(one.value / other.value)) ** 2


def _tau(orders: NDArray[Any], weights: NDArray[Any]) -> float | None:
    """tau-b of pairs with weights: concordant less discordant, over the pairs that are not tied."""
    one, other = orders[:, 0], orders[:, 1]
    if not (weights * one * other).any():
        return None
    pairs = float((weights * (one != 0)).sum()) * float((weights * (other != 0)).sum())
    return float((weights * one * other).sum()) / math.sqrt(pairs)


def sampled_ranks(num_ranked: int) -> list[int]:
    """The ranks of a verification: the top 4, and those at 25, 50, 75 and 100 % of a leaderboard.

    A short leaderboard has fewer.
    """
    shares = (math.ceil(share * num_ranked) for share in (0.25, 0.5, 0.75, 1.0))
    return sorted({rank for rank in (1, 2, 3, 4, *shares) if 1 <= rank <= num_ranked})

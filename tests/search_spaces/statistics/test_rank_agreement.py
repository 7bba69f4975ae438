"""Kendall's tau with ties, against SciPy, and the sample of a leaderboard."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from search_spaces.statistics import rank_agreement as module
from search_spaces.statistics.rank_agreement import (
    MeasuredValue,
    order_of,
    rank_agreement,
    sampled_ranks,
)


def exact(value: float) -> MeasuredValue:
    return MeasuredValue(value=value, low=value, high=value)


def about(value: float, share: float) -> MeasuredValue:
    return MeasuredValue(value=value, low=value * (1 - share), high=value * (1 + share))


figures = st.integers(min_value=1, max_value=6).map(float)


@settings(max_examples=40)
@given(st.lists(st.tuples(figures, figures), min_size=2, max_size=9))
def test_tau_is_scipy_s_where_figures_are_exact(pairs: list[tuple[float, float]]) -> None:
    first, second = ([exact(pair[side]) for pair in pairs] for side in (0, 1))
    expected = kendalltau(*zip(*pairs, strict=True), variant="b").statistic
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_RESAMPLES", 10)  # of the interval, which is another test's
        tau = rank_agreement(first, second).tau
    concordant = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    if not any(concordant):  # no pair is told apart by both
        assert tau is None
    else:
        assert tau == pytest.approx(expected)


def test_overlapping_intervals_are_ties_that_a_stated_number_of_runs_would_order() -> None:
    assert order_of(about(100, 0.1), about(115, 0.1)) == 0
    assert order_of(about(100, 0.01), about(115, 0.01)) == -1
    swapped = [about(100, 0.1), about(110, 0.1), about(50, 0.01)]
    same = [about(110, 0.1), about(100, 0.1), about(40, 0.01)]
    assert rank_agreement(swapped, same).tau == pytest.approx(1.0)
    first = [about(100, 0.2), about(110, 0.2), about(200, 0.01)]
    second = [about(100, 0.3), about(100, 0.3), about(110, 0.3)]
    found = rank_agreement(first, second)
    assert (found.tau, found.low, found.high) == (None, None, None)
    # Of the three pairs, the one in the middle is 10 % apart in the second, with 31 % to each side.
    assert found.times_the_runs == pytest.approx((2 * 0.3095 / math.log(1.1)) ** 2, rel=1e-3)
    assert rank_agreement(first[:2], [about(100, 0.3)] * 2).times_the_runs is None


def test_the_interval_holds_tau_and_is_narrow_only_for_equal_orders() -> None:
    values = [exact(float(place)) for place in range(1, 9)]
    equal = rank_agreement(values, values)
    assert (equal.low, equal.tau, equal.high) == (1.0, pytest.approx(1.0), 1.0)
    mixed = [values[place] for place in (1, 0, 3, 2, 5, 7, 4, 6)]
    between = rank_agreement(values, mixed)
    assert between.tau is not None
    assert between.low is not None
    assert between.high is not None
    assert between.low < between.tau < between.high
    assert rank_agreement(values, mixed) == between, "the same figures give the same interval"


def test_the_sample_is_the_top_and_the_quarters() -> None:
    assert sampled_ranks(100) == [1, 2, 3, 4, 25, 50, 75, 100]
    assert sampled_ranks(10) == [1, 2, 3, 4, 5, 8, 10]
    assert [sampled_ranks(few) for few in (3, 1, 0)] == [[1, 2, 3], [1], []]

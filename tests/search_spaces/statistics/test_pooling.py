"""Variances of step times are those of `statistics`, which adds fractions, to the last digits."""

from __future__ import annotations

import math
from statistics import variance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.statistics.pooling import MEDIAN_VARIANCE, PooledRuns, squares_of_runs

SECONDS = st.floats(1e-3, 1e4)


@settings(max_examples=200, deadline=None)
@given(middle=SECONDS, offs=st.lists(st.floats(-1e-3, 1e-3), min_size=2, max_size=12))
def test_of_times_that_lie_close_together_no_digit_is_lost(
    middle: float, offs: list[float]
) -> None:
    times = [middle * (1 + off) for off in offs]
    expected = variance([math.log(time) for time in times])
    assert squares_of_runs(times) == pytest.approx((len(times) - 1) * expected, rel=1e-12, abs=0)
    pooled = PooledRuns.of([times])
    assert pooled.variance == pytest.approx(
        MEDIAN_VARIANCE * expected / len(times), rel=1e-12, abs=0
    )


@given(time=SECONDS, number=st.integers(2, 12))
def test_equal_times_have_no_variance_at_all(time: float, number: int) -> None:
    assert squares_of_runs([time] * number) == 0.0
    assert PooledRuns.of([[time] * number]).variance == 0.0

"""The error of a step time from iterations and runs."""

from __future__ import annotations

import math
from statistics import variance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.statistics.confidence import student_quantile
from search_spaces.statistics.pooling import MEDIAN_VARIANCE, pooled_reach, reach_within
from search_spaces.statistics.run_spread import RunSpread

SECONDS = st.floats(1e-3, 1e4)


@settings(max_examples=200, deadline=None)
@given(middle=SECONDS, offs=st.lists(st.floats(-1e-3, 1e-3), min_size=2, max_size=12))
def test_of_times_that_lie_close_together_no_digit_is_lost(
    middle: float, offs: list[float]
) -> None:
    times = [middle * (1 + off) for off in offs]
    expected = variance([math.log(time) for time in times])
    error = math.sqrt(MEDIAN_VARIANCE * expected / len(times))
    quantile = student_quantile(0.975, len(times) - 1)
    assert reach_within([times]) == pytest.approx(quantile * error, rel=1e-12, abs=0)


@given(time=SECONDS, number=st.integers(2, 12))
def test_equal_times_have_no_variance_at_all(time: float, number: int) -> None:
    assert reach_within([[time] * number]) == 0.0


def test_more_runs_are_surer() -> None:
    run, spread = [0.50, 0.51, 0.49, 0.50, 0.52], RunSpread.prior()
    one, two, three = (pooled_reach([run] * num, spread) for num in (1, 2, 3))
    assert two == pytest.approx(one / math.sqrt(2))
    assert three == pytest.approx(one * math.sqrt(MEDIAN_VARIANCE / 3))


def test_of_two_runs_that_lie_far_apart_either_may_be_the_disturbed_one() -> None:
    known = RunSpread.prior().told([[0.5, 0.501]] * 50)
    assert pooled_reach([[0.5], [0.65]], known) == pytest.approx(math.log(1.3) / 2)
    assert pooled_reach([[0.5], [0.65], [0.5]], known) < 0.02

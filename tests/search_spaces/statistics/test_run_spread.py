"""The spread between runs: a prior, updated by repeats, and the pooled error of a step time."""

from __future__ import annotations

import math
import random
from statistics import variance

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.statistics.confidence import student_quantile
from search_spaces.statistics.pooling import MEDIAN_VARIANCE, pooled_reach, reach_within
from search_spaces.statistics.run_spread import MOST_LAYOUTS, RunSpread


def repeated(spread: float, *, layouts: int, runs: int = 2, seed: int = 0) -> list[list[float]]:
    """Step times of some layouts, each with a step time of its own."""
    dice = random.Random(seed)
    return [
        [math.exp(0.3 * place + dice.gauss(0.0, spread)) for _ in range(runs)]
        for place in range(layouts)
    ]


def test_before_repeats_a_run_may_be_off_by_a_sixth_and_two_alone_change_little() -> None:
    prior = RunSpread.prior()
    assert prior.weights.sum() == pytest.approx(1.0)
    assert 0.12 < prior.reach < 0.18
    assert prior.told([[1.0], [2.0]]) is prior, "single runs tell nothing"
    prior = RunSpread.prior()
    apart = prior.told([[21_776.0, 16_450.0]])  # of a layout that ran twice on a busy machine
    assert prior.reach < apart.reach < 0.5, "not 397 to 577,420 tokens/s around 15,144"
    alike = prior.told([[1.0, 1.0]])
    assert 0.02 < alike.reach < prior.reach


@pytest.mark.parametrize(("spread", "runs"), [(0.005, 2), (0.03, 4), (0.1, 2)])
def test_many_repeats_leave_the_spread_that_they_have(spread: float, runs: int) -> None:
    told = RunSpread.prior().told(repeated(spread, layouts=100, runs=runs))
    assert told.reach == pytest.approx(1.96 * spread, rel=0.2)
    assert math.sqrt(told.variance) == pytest.approx(spread, rel=0.2)


def test_one_disturbed_run_among_many_widens_little() -> None:
    layouts = repeated(0.01, layouts=4, runs=3)
    layouts[0][0] *= 1.3
    told = RunSpread.prior().told(layouts)
    assert told.reach < 1.96 * 0.025
    plain = math.sqrt(np.mean([np.var(np.log(runs), ddof=1) for runs in layouts]))
    assert plain > 0.07, "the pooled standard deviation is ruined"


def test_repeats_told_in_parts_are_told() -> None:
    layouts = repeated(0.02, layouts=9, runs=3)
    at_once = RunSpread.prior().told(layouts)
    in_parts = RunSpread.prior().told(layouts[:4]).told(layouts[4:])
    np.testing.assert_allclose(in_parts.weights, at_once.weights, rtol=1e-9)
    many = repeated(0.02, layouts=MOST_LAYOUTS + 50)
    np.testing.assert_array_equal(
        RunSpread.prior().told(many).weights, RunSpread.prior().told(many[:MOST_LAYOUTS]).weights
    )


def test_runs_that_scatter_widely_rule_no_small_spread_out_for_ever() -> None:
    wide, quiet = [[1.0, 1.12, 1.25]], repeated(0.002, layouts=150, runs=3)
    at_once = RunSpread.prior().told([*wide, *quiet])
    in_parts = RunSpread.prior().told(wide).told(quiet)
    assert RunSpread.prior().told(wide).weights[0] == 0.0
    np.testing.assert_allclose(in_parts.weights, at_once.weights, rtol=1e-9, atol=1e-300)
    assert math.sqrt(in_parts.variance) < 0.01


SECONDS = st.floats(1e-3, 1e4)


@settings(max_examples=100)
@given(middle=SECONDS, offs=st.lists(st.floats(-1e-3, 1e-3), min_size=2, max_size=12))
def test_of_times_that_lie_close_together_no_digit_is_lost(
    middle: float, offs: list[float]
) -> None:
    times = [middle * (1 + off) for off in offs]
    expected = variance([math.log(time) for time in times])
    error = math.sqrt(MEDIAN_VARIANCE * expected / len(times))
    quantile = student_quantile(0.975, len(times) - 1)
    assert reach_within([times]) == pytest.approx(quantile * error, rel=1e-12, abs=0)
    assert reach_within([[middle] * len(offs)]) == 0.0, "equal times have no variance at all"


def test_more_runs_are_surer_and_of_two_that_lie_far_apart_either_may_be_disturbed() -> None:
    run, spread = [0.50, 0.51, 0.49, 0.50, 0.52], RunSpread.prior()
    one, two, three = (pooled_reach([run] * num, spread) for num in (1, 2, 3))
    assert two == pytest.approx(one / math.sqrt(2))
    assert three == pytest.approx(one * math.sqrt(MEDIAN_VARIANCE / 3))
    known = RunSpread.prior().told([[0.5, 0.501]] * 50)
    assert pooled_reach([[0.5], [0.65]], known) == pytest.approx(math.log(1.3) / 2)
    assert pooled_reach([[0.5], [0.65], [0.5]], known) < 0.02

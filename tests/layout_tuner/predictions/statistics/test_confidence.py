"""Student's t, the spread between runs, what can be told apart, and how well ranks agree."""

from __future__ import annotations

import math
import random
from itertools import combinations, combinations_with_replacement, compress, product
from statistics import variance

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from layout_tuner.predictions.statistics import rank_agreement as module
from layout_tuner.predictions.statistics.confidence import (
    Estimate,
    can_be_told_apart,
    is_slower,
    reach_of_ratio,
    student_quantile,
    student_tail,
)
from layout_tuner.predictions.statistics.disturbance import (
    DISTURBED_SHARE,
    disturbance_words,
    disturbed_least,
    is_disturbed,
    possible_slowdown,
)
from layout_tuner.predictions.statistics.early_stop import LEAST_TIMED, shows_enough
from layout_tuner.predictions.statistics.pooling import MEDIAN_VARIANCE, pooled_reach, reach_within
from layout_tuner.predictions.statistics.rank_agreement import (
    MeasuredValue,
    order_of,
    rank_agreement,
    sampled_ranks,
)
from layout_tuner.predictions.statistics.run_spread import MOST_LAYOUTS, RunSpread


def test_quantiles_are_those_of_the_tables() -> None:
    # Abramowitz and Stegun 1964, table 26.10.
    table = {(1, 0.95): 6.314, (2, 0.975): 4.303, (5, 0.99): 3.365, (9, 0.95): 1.833}
    for (dof, probability), t in {**table, (30, 0.995): 2.750}.items():
        assert student_quantile(probability, dof) == pytest.approx(t, abs=1e-3)
        assert student_tail(t, dof) == pytest.approx(1 - probability, abs=2e-4)
        assert student_tail(-t, dof) == pytest.approx(probability, abs=2e-4)


def ends_of(num: int, seed: int, *, excess: float = 0.0) -> list[int | None]:
    """After how many iterations probes of ten are stopped, of a layout slower than the best."""
    dice = random.Random(seed)

    def stopped_after() -> int | None:
        step_times_s = [0.5 * (1 + excess) * math.exp(dice.gauss(0.0, 0.02)) for _ in range(10)]
        looks = (done for done in range(1, 10) if shows_enough(step_times_s[:done], 0.5))
        return next(looks, None)

    return [stopped_after() for _ in range(num)]


def test_a_slow_layout_is_stopped_at_once_an_equal_one_seldom_and_a_better_one_hardly_ever() -> (
    None
):
    assert set(ends_of(100, 5, excess=0.3)) == {LEAST_TIMED}
    assert not shows_enough([5.0, 5.0], 0.5), "two iterations say nothing"
    stopped = sum(end is not None for end in ends_of(1000, 4))
    assert 0 < stopped / 1000 <= 0.05, "seven looks, and still 5 % over all of them"
    assert sum(end is not None for end in ends_of(500, 6, excess=-0.03)) <= 1


def test_stragglers_do_not_stop_a_layout_whose_median_is_better() -> None:
    assert not is_slower([0.49, 0.49, 0.49, 0.9, 0.9], 0.5, confidence=0.5)
    assert is_slower([0.55, 0.56, 0.55, 0.56, 0.55], 0.5)
    assert is_slower([0.6, 0.6, 0.6], 0.5)
    assert not is_slower([0.5, 0.5, 0.5], 0.5)


def test_two_figures_are_told_apart_in_one_case_of_twenty_where_they_are_equal() -> None:
    dice = random.Random(7)

    def sample(shift: float) -> Estimate:
        return Estimate(log=shift + dice.gauss(0.0, 0.02), reach=1.96 * 0.02)

    apart = sum(can_be_told_apart(sample(0.0), sample(0.0)) for _ in range(4000)) / 4000
    assert 0.035 < apart < 0.065
    assert all(can_be_told_apart(sample(0.0), sample(0.2)) for _ in range(200))
    # The interval of their ratio has one in it unless they can be told apart.
    different = []
    for _ in range(300):
        one, other = (
            Estimate(log=dice.gauss(0.0, 0.02), reach=dice.uniform(0.001, 0.04)) for _ in range(2)
        )
        different.append(can_be_told_apart(one, other))
        assert different[-1] == (abs(one.log - other.log) > reach_of_ratio(one, other))
    assert 0.1 < sum(different) / len(different) < 0.9
    exact, measured = Estimate(log=0.0, reach=0.0), Estimate(log=0.1, reach=0.02)
    assert reach_of_ratio(measured, exact) == pytest.approx(0.02)
    assert not can_be_told_apart(exact, exact)


def test_the_runs_of_a_layout_that_count_are_all_disturbed_or_all_quiet() -> None:
    """So that a layout's mark is that of the trial which stands for it."""
    shares = (None, 0.0, math.nextafter(DISTURBED_SHARE, 0), DISTURBED_SHARE, 0.06, 0.3, 1.0)
    for runs in combinations_with_replacement(product(shares, (None, False, True)), 3):
        counting = list(compress(runs, disturbed_least(runs)))
        assert counting
        are_all_disturbed = all(is_disturbed(*run) for run in runs)
        assert {is_disturbed(*run) for run in counting} == {are_all_disturbed}


def test_disturbed_probes_may_be_slower_and_of_several_runs_the_least_disturbed_count() -> None:
    for others_share, throttled, expected in (
        (None, None, False),
        (0.0, False, False),
        (DISTURBED_SHARE - 1e-9, False, False),
        (DISTURBED_SHARE, None, True),
        (1.0, False, True),
        (None, True, True),
        (0.0, True, True),
    ):
        assert is_disturbed(others_share, throttled) is expected, (others_share, throttled)
    assert possible_slowdown(None, None) == possible_slowdown(0.04, False) == 0.0
    assert possible_slowdown(0.5, None) == pytest.approx(1.5 * math.log(2))
    assert possible_slowdown(None, True) == pytest.approx(math.log(1.2))
    assert possible_slowdown(1.0, True) < 5.0, "an interval has an end"
    for shares, counts in (
        ((0.0, 0.04, 0.06), [True, True, False]),
        ((0.5, 0.08, 0.06), [False, True, True]),
        ((0.5,), [True]),
        ((None, 0.3), [True, False]),
    ):
        assert disturbed_least([(share, None) for share in shares]) == counts


def test_the_words_of_a_disturbance_say_what_the_product_took_itself() -> None:
    assert disturbance_words(None, None, None) == ""
    assert disturbance_words(0.031, False) == "3.1% of a device's time"
    own = "8.0% of a device's time (1.2% by layout-tuner's own processes), disturbed"
    assert disturbance_words(0.08, None, 0.012) == own


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
    assert between.low < between.tau < between.high
    assert rank_agreement(values, mixed) == between, "the same figures give the same interval"


def test_the_sample_is_the_top_and_the_quarters() -> None:
    assert sampled_ranks(100) == [1, 2, 3, 4, 25, 50, 75, 100]
    assert sampled_ranks(10) == [1, 2, 3, 4, 5, 8, 10]
    assert [sampled_ranks(few) for few in (3, 1, 0)] == [[1, 2, 3], [1], []]


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
    assert prior.updated([[1.0], [2.0]]) is prior, "single runs tell nothing"
    prior = RunSpread.prior()
    apart = prior.updated([[21_776.0, 16_450.0]])  # of a layout that ran twice on a busy machine
    assert prior.reach < apart.reach < 0.5, "not 397 to 577,420 tokens/s around 15,144"
    alike = prior.updated([[1.0, 1.0]])
    assert 0.02 < alike.reach < prior.reach


@pytest.mark.parametrize(("spread", "runs"), [(0.005, 2), (0.03, 4), (0.1, 2)])
def test_many_repeats_leave_the_spread_that_they_have(spread: float, runs: int) -> None:
    told = RunSpread.prior().updated(repeated(spread, layouts=100, runs=runs))
    assert told.reach == pytest.approx(1.96 * spread, rel=0.2)
    assert math.sqrt(told.variance) == pytest.approx(spread, rel=0.2)


def test_one_disturbed_run_among_many_widens_little() -> None:
    layouts = repeated(0.01, layouts=4, runs=3)
    layouts[0][0] *= 1.3
    told = RunSpread.prior().updated(layouts)
    assert told.reach < 1.96 * 0.025
    plain = math.sqrt(np.mean([np.var(np.log(runs), ddof=1) for runs in layouts]))
    assert plain > 0.07, "the pooled standard deviation is ruined"


def test_repeats_told_in_parts_are_told() -> None:
    layouts = repeated(0.02, layouts=9, runs=3)
    at_once = RunSpread.prior().updated(layouts)
    in_parts = RunSpread.prior().updated(layouts[:4]).updated(layouts[4:])
    np.testing.assert_allclose(in_parts.weights, at_once.weights, rtol=1e-9)
    many = repeated(0.02, layouts=MOST_LAYOUTS + 50)
    np.testing.assert_array_equal(
        RunSpread.prior().updated(many).weights,
        RunSpread.prior().updated(many[:MOST_LAYOUTS]).weights,
    )


def test_runs_that_scatter_widely_rule_no_small_spread_out_for_ever() -> None:
    wide, quiet = [[1.0, 1.12, 1.25]], repeated(0.002, layouts=150, runs=3)
    at_once = RunSpread.prior().updated([*wide, *quiet])
    in_parts = RunSpread.prior().updated(wide).updated(quiet)
    assert RunSpread.prior().updated(wide).weights[0] == 0.0
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
    known = RunSpread.prior().updated([[0.5, 0.501]] * 50)
    assert pooled_reach([[0.5], [0.65]], known) == pytest.approx(math.log(1.3) / 2)
    assert pooled_reach([[0.5], [0.65], [0.5]], known) < 0.02

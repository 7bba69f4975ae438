"""Student's t, what can be told apart, and when a probe has shown enough."""

from __future__ import annotations

import math
import random

import pytest

from search_spaces.statistics.confidence import (
    Estimate,
    can_be_told_apart,
    is_slower,
    reach_of_ratio,
    student_quantile,
    student_tail,
)
from search_spaces.statistics.disturbance import (
    DISTURBED_SHARE,
    disturbed_least,
    is_disturbed,
    possible_slowdown,
)
from search_spaces.statistics.early_stop import LEAST_TIMED, shows_enough


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

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
from search_spaces.statistics.early_stop import LEAST_TIMED, shows_enough


@pytest.mark.parametrize(
    ("dof", "probability", "t"),
    # Abramowitz and Stegun 1964, table 26.10.
    [(1, 0.95, 6.314), (2, 0.975, 4.303), (5, 0.99, 3.365), (9, 0.95, 1.833), (30, 0.995, 2.750)],
)
def test_quantiles_are_those_of_the_tables(dof: int, probability: float, t: float) -> None:
    assert student_quantile(probability, dof) == pytest.approx(t, abs=1e-3)
    assert student_tail(t, dof) == pytest.approx(1 - probability, abs=2e-4)
    assert student_tail(-t, dof) == pytest.approx(probability, abs=2e-4)


def noisy(
    dice: random.Random, num: int, *, excess: float = 0.0, noise: float = 0.02
) -> list[float]:
    return [0.5 * (1 + excess) * math.exp(dice.gauss(0.0, noise)) for _ in range(num)]


def stopped_after(step_times_s: list[float], than_s: float) -> int | None:
    for done in range(1, len(step_times_s)):
        if shows_enough(step_times_s[:done], than_s):
            return done
    return None


def test_a_layout_as_good_as_the_best_is_stopped_in_at_most_one_probe_of_twenty() -> None:
    dice = random.Random(4)
    stopped = sum(stopped_after(noisy(dice, 10), 0.5) is not None for _ in range(2000))
    assert 0 < stopped / 2000 <= 0.05, "seven looks, and still 5 % over all of them"


def test_a_slow_layout_is_stopped_at_the_first_look_and_not_before() -> None:
    dice = random.Random(5)
    ends = [stopped_after(noisy(dice, 10, excess=0.3), 0.5) for _ in range(200)]
    assert set(ends) == {LEAST_TIMED}
    assert not shows_enough([5.0, 5.0], 0.5), "two iterations say nothing"


def test_a_better_layout_is_hardly_ever_stopped() -> None:
    dice = random.Random(6)
    ends = [stopped_after(noisy(dice, 10, excess=-0.03), 0.5) for _ in range(1000)]
    assert sum(end is not None for end in ends) <= 2


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


def test_the_interval_of_a_ratio_has_one_in_it_unless_the_two_can_be_told_apart() -> None:
    dice = random.Random(5)
    apart = []
    for _ in range(300):
        one, other = (
            Estimate(log=dice.gauss(0.0, 0.02), reach=dice.uniform(0.001, 0.04)) for _ in range(2)
        )
        apart.append(can_be_told_apart(one, other))
        assert apart[-1] == (abs(one.log - other.log) > reach_of_ratio(one, other))
    assert 0.1 < sum(apart) / len(apart) < 0.9


def test_a_ratio_to_an_exact_value_is_as_uncertain_as_the_other() -> None:
    exact, measured = Estimate(log=0.0, reach=0.0), Estimate(log=0.1, reach=0.02)
    assert reach_of_ratio(measured, exact) == pytest.approx(0.02)
    assert not can_be_told_apart(exact, exact)

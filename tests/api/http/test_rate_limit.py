"""Permits: a burst at first, then a steady rate, each key for itself."""

import pytest

from api.http.rate_limit import Throttle


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_after_a_burst_a_permit_comes_at_the_steady_rate() -> None:
    clock = Clock()
    throttle = Throttle(per_s=2.0, burst=3.0, clock=clock)
    assert [throttle.take("a") for _ in range(3)] == [0, 0, 0]
    assert throttle.take("a") == pytest.approx(0.5)
    clock.now += 0.25
    assert throttle.take("a") == pytest.approx(0.25)
    clock.now += 0.25
    assert throttle.take("a") == 0
    assert throttle.take("a") > 0


def test_being_refused_costs_nothing_and_saving_ends_at_the_burst() -> None:
    clock = Clock()
    throttle = Throttle(per_s=1.0, burst=2.0, clock=clock)
    assert [throttle.take("a") > 0 for _ in range(5)] == [False, False, True, True, True]
    clock.now += 1000
    assert [throttle.take("a") > 0 for _ in range(3)] == [False, False, True]


def test_keys_do_not_share_and_what_is_given_back_can_be_taken_again() -> None:
    throttle = Throttle(per_s=1.0, burst=1.0, clock=Clock())
    assert throttle.take("a") == 0
    assert throttle.take("b") == 0
    throttle.give_back("a")
    assert throttle.take("a") == 0
    assert throttle.take("b") > 0


def test_it_remembers_no_more_keys_than_it_may() -> None:
    throttle = Throttle(per_s=1.0, burst=1.0, max_keys=2, clock=Clock())
    for key in "abc":
        assert throttle.take(key) == 0
    assert throttle.take("a") == 0  # forgotten, and begins anew
    assert throttle.take("c") > 0

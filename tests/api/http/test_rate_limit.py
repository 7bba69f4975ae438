"""Permits and guesses: a burst at first, then a steady rate, each key or address for itself."""

import logging

import pytest

from api.http.rate_limit import (
    GUESSES_PER_S,
    GUESSES_PER_S_OF_ALL,
    GuessLimit,
    Throttle,
    network_of,
)


class Ticks:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_after_a_burst_a_permit_comes_at_the_steady_rate_and_being_refused_costs_nothing() -> None:
    clock = Ticks()
    throttle = Throttle(per_s=2.0, burst=3.0, clock=clock)
    assert [throttle.take("a") for _ in range(3)] == [0, 0, 0]
    assert throttle.take("a") == pytest.approx(0.5)
    clock.now += 0.25
    assert throttle.take("a") == pytest.approx(0.25)
    clock.now += 0.25
    assert throttle.take("a") == 0
    assert throttle.take("a") > 0

    clock = Ticks()
    throttle = Throttle(per_s=1.0, burst=2.0, clock=clock)
    assert [throttle.take("a") > 0 for _ in range(5)] == [False, False, True, True, True]
    clock.now += 1000
    assert [throttle.take("a") > 0 for _ in range(3)] == [False, False, True]


def test_keys_do_not_share_and_no_more_of_them_than_allowed_are_remembered() -> None:
    throttle = Throttle(per_s=1.0, burst=1.0, clock=Ticks())
    assert throttle.take("a") == 0
    assert throttle.take("b") == 0
    throttle.give_back("a")
    assert throttle.take("a") == 0
    assert throttle.take("b") > 0

    throttle = Throttle(per_s=1.0, burst=1.0, max_keys=2, clock=Ticks())
    for key in "abc":
        assert throttle.take(key) == 0
    assert throttle.take("a") == 0  # forgotten, and begins anew
    assert throttle.take("c") > 0


def test_in_an_hour_an_address_guesses_some_hundred_times() -> None:
    clock = Ticks()
    limit = GuessLimit(10, clock=clock)
    looked_up = 0
    for _ in range(36_000):
        looked_up += limit.begin("192.0.2.1") == 0
        clock.now += 0.1
    assert looked_up == pytest.approx(10 + 3600 * GUESSES_PER_S, abs=2)


def test_many_addresses_together_are_slowed_too() -> None:
    limit = GuessLimit(10, clock=Ticks())
    waits = [limit.begin(f"198.51.{number // 250}.{number % 250}") for number in range(999)]
    assert sum(wait_s == 0 for wait_s in waits) == 200
    assert max(waits) <= 1 / GUESSES_PER_S_OF_ALL + 1e-9


def test_a_network_of_one_host_counts_as_one_address() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") == "2001:db8::/64"
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") == "192.0.2.1"
    assert network_of("testclient") == "testclient"


def test_the_log_says_so_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Ticks()
    limit = GuessLimit(1, clock=clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            limit.begin("192.0.2.1")
        assert len(caplog.messages) == 1
        clock.now += 61
        for _ in range(15):
            limit.begin("192.0.2.1")
    assert len(caplog.messages) == 2
    assert "192.0.2.1 sends wrong sign-in codes" in caplog.text

"""Guessing of sign-in codes is slowed by address."""

import logging

import pytest

from api.http.rate_limit import network_of
from api.security.guess_limit import PER_S, PER_S_OF_ALL, GuessLimit


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_after_some_wrong_codes_an_address_waits_between_them() -> None:
    clock = Clock()
    limit = GuessLimit(3, clock=clock)
    assert [limit.begin("192.0.2.1") > 0 for _ in range(5)] == [0, 0, 0, 1, 1]
    assert limit.begin("192.0.2.1") == pytest.approx(1 / PER_S)
    clock.now += 1 / PER_S
    assert limit.begin("192.0.2.1") == 0
    assert limit.begin("192.0.2.1") > 0
    assert limit.begin("192.0.2.2") == 0


def test_a_right_code_is_no_guess() -> None:
    limit = GuessLimit(2, clock=Clock())
    for _ in range(5):
        assert limit.begin("192.0.2.1") == 0
        limit.was_no_guess("192.0.2.1")
    assert [limit.begin("192.0.2.1") > 0 for _ in range(3)] == [0, 0, 1]


def test_in_an_hour_an_address_guesses_some_hundred_times() -> None:
    clock = Clock()
    limit = GuessLimit(10, clock=clock)
    looked_up = 0
    for _ in range(36_000):
        looked_up += limit.begin("192.0.2.1") == 0
        clock.now += 0.1
    assert looked_up == pytest.approx(10 + 3600 * PER_S, abs=2)


def test_many_addresses_together_are_slowed_too() -> None:
    limit = GuessLimit(10, clock=Clock())
    waits = [limit.begin(f"198.51.{number // 250}.{number % 250}") for number in range(999)]
    assert sum(wait_s == 0 for wait_s in waits) == 200
    assert max(waits) <= 1 / PER_S_OF_ALL + 1e-9


def test_a_network_of_one_host_counts_as_one_address() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") == "2001:db8::/64"
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") == "192.0.2.1"
    assert network_of("testclient") == "testclient"


def test_the_log_says_so_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
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

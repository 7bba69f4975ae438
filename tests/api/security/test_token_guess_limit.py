"""Guessing is slowed by address, and who works there already is not held up."""

import logging

import pytest

from api.security.token_guess_limit import PER_S, PER_S_OF_ALL, Guesses, network_of

WRONG = [f"hash-{number}" for number in range(1000)]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def guess(guesses: Guesses, address: str, hashed: str) -> float:
    """Sends a wrong token; the seconds to wait with it, 0 where it was looked up."""
    wait_s = guesses.begin(address, hashed)
    if wait_s == 0:
        guesses.was_wrong(address, hashed)
    return wait_s


def test_after_some_wrong_tokens_an_address_waits_between_them() -> None:
    clock = Clock()
    guesses = Guesses(3, clock=clock)
    assert [guess(guesses, "192.0.2.1", wrong) > 0 for wrong in WRONG[:5]] == [0, 0, 0, 1, 1]
    assert guess(guesses, "192.0.2.1", "x") == pytest.approx(1 / PER_S)
    clock.now += 1 / PER_S
    assert guess(guesses, "192.0.2.1", "x") == 0
    assert guess(guesses, "192.0.2.1", "x") > 0


def test_a_token_that_nobody_could_judge_was_no_guess() -> None:
    guesses = Guesses(2, clock=Clock())
    for _ in range(5):
        assert guesses.begin("192.0.2.1", "right") == 0
        guesses.was_not_judged("192.0.2.1", "right")
    assert [guess(guesses, "192.0.2.1", wrong) > 0 for wrong in WRONG[:3]] == [0, 0, 1]


def test_in_an_hour_an_address_guesses_some_hundred_times() -> None:
    clock = Clock()
    guesses = Guesses(10, clock=clock)
    looked_up = 0
    for _ in range(36_000):
        looked_up += guess(guesses, "192.0.2.1", "x") == 0
        clock.now += 0.1
    assert looked_up == pytest.approx(10 + 3600 * PER_S, abs=2)


def test_a_token_that_was_right_is_let_in_while_its_address_waits() -> None:
    guesses = Guesses(1, clock=Clock())
    assert guesses.begin("192.0.2.1", "right") == 0
    guesses.was_right("192.0.2.1", "right")
    assert guess(guesses, "192.0.2.1", "wrong") == 0  # the right one cost no permit
    assert guess(guesses, "192.0.2.1", "wrong") > 0
    assert guesses.begin("192.0.2.1", "right") == 0
    # From elsewhere, or once it is not right any more, it is a guess like others.
    assert guess(guesses, "192.0.2.2", "wrong") == 0
    assert guesses.begin("192.0.2.2", "right") > 0
    guesses.was_wrong("192.0.2.1", "right")
    assert guesses.begin("192.0.2.1", "right") > 0


def test_many_addresses_together_are_slowed_too() -> None:
    clock = Clock()
    guesses = Guesses(10, clock=clock)
    waits = [guess(guesses, f"198.51.{number // 250}.{number % 250}", "x") for number in range(999)]
    assert sum(wait_s == 0 for wait_s in waits) == 200
    assert max(waits) <= 1 / PER_S_OF_ALL + 1e-9


def test_a_network_of_one_host_counts_as_one_address() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1") == "2001:db8::/64"
    assert network_of("2001:db8:0:1::1") != network_of("2001:db8::1")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") == "192.0.2.1"
    assert network_of("testclient") == "testclient"


def test_the_log_says_so_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    guesses = Guesses(1, clock=clock)
    with caplog.at_level(logging.WARNING):
        for _ in range(50):
            guess(guesses, "192.0.2.1", "secret-hash")
        assert len(caplog.messages) == 1
        clock.now += 61
        guess(guesses, "192.0.2.1", "secret-hash")
        guess(guesses, "192.0.2.1", "secret-hash")
    assert len(caplog.messages) == 2
    assert "192.0.2.1 sends wrong tokens" in caplog.text
    assert "secret-hash" not in caplog.text

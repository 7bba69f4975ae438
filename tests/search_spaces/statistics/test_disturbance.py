import math

import pytest

from search_spaces.statistics.disturbance import (
    DISTURBED_SHARE,
    disturbed_least,
    is_disturbed,
    possible_slowdown,
)


def test_a_probe_is_disturbed_by_others_on_its_devices_or_by_held_clocks() -> None:
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


def test_a_disturbed_probe_may_be_slower_by_more_than_what_others_took() -> None:
    assert possible_slowdown(None, None) == possible_slowdown(0.04, False) == 0.0
    assert possible_slowdown(0.5, None) == pytest.approx(1.5 * math.log(2))
    assert possible_slowdown(None, True) == pytest.approx(math.log(1.2))
    assert possible_slowdown(1.0, True) < 5.0, "an interval has an end"


def test_of_a_layouts_runs_those_that_were_disturbed_least_count() -> None:
    for shares, counts in (
        ((0.0, 0.04, 0.06), [True, True, False]),
        ((0.5, 0.08, 0.06), [False, True, True]),
        ((0.5,), [True]),
        ((None, 0.3), [True, False]),
    ):
        assert disturbed_least([(share, None) for share in shares]) == counts

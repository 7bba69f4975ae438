import pytest

from search_spaces.statistics.disturbance import DISTURBED_SHARE, is_disturbed


@pytest.mark.parametrize(
    ("others_share", "throttled", "expected"),
    [
        (None, None, False),
        (0.0, False, False),
        (DISTURBED_SHARE - 1e-9, False, False),
        (DISTURBED_SHARE, None, True),
        (1.0, False, True),
        (None, True, True),
        (0.0, True, True),
    ],
)
def test_a_probe_is_disturbed_by_others_on_its_devices_or_by_held_clocks(
    others_share: float | None, throttled: bool | None, expected: bool
) -> None:
    assert is_disturbed(others_share, throttled) is expected

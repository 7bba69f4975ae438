from __future__ import annotations

import pytest

from search_spaces.documents.duration import longest_s, read_walltime_s, slurm_time
from search_spaces.errors import SiteInvalidError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2:00:00", 7200),
        ("90:00", 5400),
        ("1-12:00", 129_600),
        ("1-00:00:30", 86_430),
        ("2h", 7200),
        ("90m", 5400),
        ("45s", 45),
    ],
)
def test_times_are_read_as_slurm_reads_them_or_with_a_unit(text: str, seconds: float) -> None:
    assert read_walltime_s(text, field="time") == seconds


@pytest.mark.parametrize("value", ["120", 120, "2 hours", "", "1:2:3:4", None, "-1:00:00", "0h"])
def test_a_time_without_a_unit_is_refused_as_slurm_would_read_minutes(value: object) -> None:
    with pytest.raises(SiteInvalidError, match="time"):
        read_walltime_s(value, field="time")


@pytest.mark.parametrize("seconds", [1, 59.2, 60, 3600, 86_399, 86_400, 200_000])
def test_what_is_written_for_slurm_is_read_back(seconds: float) -> None:
    assert 0 <= read_walltime_s(slurm_time(seconds), field="time") - seconds < 1


def test_the_limit_is_that_of_the_smallest_class_that_holds_the_job() -> None:
    limits = {183: 6.0, 91: 2.0, 9856: 12.0}
    assert [longest_s(limits, nodes) for nodes in (1, 91, 92, 184, 9857)] == [2, 2, 6, 12, None]

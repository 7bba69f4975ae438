"""Times as Slurm writes them, and the limits that a site puts on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from search_spaces.duration import read_duration_s
from search_spaces.errors import SearchSpaceError
from search_spaces.reading import shown
from workers.slurm.errors import SiteInvalidError

_SLURM_TIME: Final = re.compile(
    r"(?:(?P<days>\d{1,4})-)?(?P<first>\d{1,6})(?::(?P<second>\d{1,2}))?(?::(?P<third>\d{1,2}))?"
)

MaxTimes = Mapping[int, float]
"""The longest wall time in seconds of jobs of up to so many nodes, by that number, ascending."""


def read_walltime_s(value: object, *, field: str) -> float:
    """Seconds of a time that is written as Slurm does ("2:00:00", "1-12:00", "90:00") or as "2h".

    Raises:
        SiteInvalidError: it is neither. A bare number is refused: Slurm reads minutes, we seconds.
    """
    if isinstance(value, str) and ":" in value and (match := _SLURM_TIME.fullmatch(value.strip())):
        return _seconds(match)
    if isinstance(value, str) and not value.strip().isdecimal():
        try:
            return read_duration_s(value, field=field)
        except SearchSpaceError as error:
            raise SiteInvalidError(error.problem, field=field) from error
    raise SiteInvalidError(
        f"{shown(value)} is not a time: write it as 2:00:00, 1-12:00:00, 2h or 90m (in YAML in quotes)",
        field=field,
    )


def _seconds(match: re.Match[str]) -> float:
    """Slurm reads MM:SS and HH:MM:SS, but D-HH:MM and D-HH:MM:SS."""
    first, second, third = (int(match[name] or 0) for name in ("first", "second", "third"))
    if match["days"] is not None:
        return float(int(match["days"]) * 86400 + first * 3600 + second * 60 + third)
    if match["third"] is not None:
        return float(first * 3600 + second * 60 + third)
    return float(first * 60 + second)


def slurm_time(seconds: float) -> str:
    """Seconds as Slurm reads them, rounded up."""
    whole = -int(-seconds // 1)
    days, rest = divmod(whole, 86400)
    text = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


def longest_s(limits: MaxTimes, num_nodes: int) -> float | None:
    """The longest wall time of a job of so many nodes; None: the limits don't speak of so many."""
    for most_nodes, seconds in sorted(limits.items()):
        if num_nodes <= most_nodes:
            return seconds
    return None

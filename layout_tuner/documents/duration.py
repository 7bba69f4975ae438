"""Durations as users write them and wall times as Slurm writes them, and the limits of a site."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from layout_tuner.documents.reading import is_positive_number, shown
from layout_tuner.errors import CampaignInvalidError, SearchSpaceError, SiteInvalidError

MAX_DURATION_S: Final = 1e9
"""Longest duration, 31 years: sums and deadlines of such durations fit every clock."""

MaxTimes = Mapping[int, float]
"""Longest wall time in seconds by the largest number of nodes it applies to, ascending."""

_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_WRITTEN: Final = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([smhd])", flags=re.ASCII)
_SLURM_TIME: Final = re.compile(
    r"(?:(?P<days>\d{1,4})-)?(?P<first>\d{1,6})(?::(?P<second>\d{1,2}))?(?::(?P<third>\d{1,2}))?",
    flags=re.ASCII,
)


def read_duration_s(value: object, *, field: str) -> float:
    """Seconds of a duration: a number of seconds, or a text such as "90s", "10m", "2h", "1d".

    Raises:
        CampaignInvalidError: it is neither, or not over 0, or longer than `MAX_DURATION_S`.
    """
    if isinstance(value, str):
        written = _WRITTEN.fullmatch(value.strip())
        seconds = float(written[1]) * _SECONDS[written[2]] if written else 0.0
    else:
        seconds = float(value) if is_positive_number(value) else 0.0
    if not seconds > 0:
        raise CampaignInvalidError(
            f"{shown(value)} is not a duration: give seconds, or a number with a unit "
            "(90s, 10m, 2h, 1d)",
            field=field,
        )
    if seconds > MAX_DURATION_S:
        raise CampaignInvalidError(
            f"{shown(value)} is longer than {MAX_DURATION_S:.0f} s, the longest that is accepted",
            field=field,
        )
    return seconds


def name_without_unit(values: dict[str, Any], name: str) -> None:
    """Renames `wall_time: 10m`, if any, to `wall_time_s: 600.0`; CampaignInvalidError if wrong."""
    if name not in values:
        return
    if f"{name}_s" in values:
        raise CampaignInvalidError(f"give {name} or {name}_s, not both", field=name)
    values[f"{name}_s"] = read_duration_s(values.pop(name), field=name)


def read_walltime_s(value: object, *, field: str) -> float:
    """Seconds of a wall time as Slurm writes it ("2:00:00", "1-12:00", "90:00"), or of "2h".

    Raises:
        SiteInvalidError: it is neither, or a bare number: Slurm counts those in minutes.
    """
    if isinstance(value, str) and ":" in value and (match := _SLURM_TIME.fullmatch(value.strip())):
        return _seconds(match)
    if isinstance(value, str) and not value.strip().isdecimal():
        try:
            return read_duration_s(value, field=field)
        except SearchSpaceError as error:
            raise SiteInvalidError(error.problem, field=field) from error
    raise SiteInvalidError(
        f"{shown(value)} is not a time: write it as 2:00:00, 1-12:00:00, 2h or 90m", field=field
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
    """Seconds in Slurm's format, rounded up."""
    whole = -int(-seconds // 1)
    days, rest = divmod(whole, 86400)
    text = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}-{text}" if days else text


def longest_s(limits: MaxTimes, num_nodes: int) -> float | None:
    """The longest wall time of a job of this many nodes; None: the limits do not cover it."""
    fitting = (seconds for most, seconds in sorted(limits.items()) if num_nodes <= most)
    return next(fitting, None)

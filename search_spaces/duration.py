"""Durations as people write them: seconds, or a number with a unit."""

from __future__ import annotations

import re
from typing import Any, Final

from search_spaces.errors import CampaignInvalidError
from search_spaces.reading import is_positive_number, shown

MAX_DURATION_S: Final = 1e9
"""Longest duration, 31 years: sums and deadlines of such stay far within what clocks can count."""

_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_WRITTEN: Final = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([smhd])", flags=re.ASCII)


def read_duration_s(value: object, *, field: str) -> float:
    """Seconds of a duration: a number of seconds, or a string as "90s", "10m", "2h", "1d".

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
    """Renames a duration that was written without the unit in its name, as `wall_time: 10m`.

    Raises:
        CampaignInvalidError: it is no duration, or is given under both names.
    """
    if name not in values:
        return
    if f"{name}_s" in values:
        raise CampaignInvalidError(f"give {name} or {name}_s, not both", field=name)
    values[f"{name}_s"] = read_duration_s(values.pop(name), field=name)

"""Units of figures, memory in words, and a constant of statistics."""

from __future__ import annotations

from typing import Final

GIB: Final = 1 << 30
SECONDS_PER_HOUR: Final = 3600.0

NORMAL_95: Final = 1.96
"""Standard deviations on each side that hold 95 % of a normal distribution."""


def memory(value_bytes: int | None) -> str:
    """Bytes in KiB, MiB, GiB or TiB."""
    if value_bytes is None:
        return "-"
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20)):
        if value_bytes >= size:
            return f"{value_bytes / size:.4g} {unit}"
    return f"{value_bytes / 1024:.4g} KiB"

"""Units that figures are converted between, and a constant of statistics."""

from __future__ import annotations

from typing import Final

GIB: Final = 1 << 30
SECONDS_PER_HOUR: Final = 3600.0

NORMAL_95: Final = 1.96
"""Standard deviations on each side that hold 95 % of a normal distribution."""

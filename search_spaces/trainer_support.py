"""What the embedded trainer can run today: the one place where search spaces learn of it."""

from __future__ import annotations

from typing import Final

from search_spaces.layout import PRECISIONS, Precision

ZERO_GROUPS_SUPPORTED: Final[bool] = True
"""Whether ZeRO's shard groups may be smaller than dp (zero_replicas over 1)."""

PRECISIONS_SUPPORTED: Final[tuple[Precision, ...]] = PRECISIONS
"""Precisions that it trains in."""

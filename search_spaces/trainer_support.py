"""What the embedded trainer can run today: the one place where search spaces learn of it."""

from __future__ import annotations

from typing import Final

from search_spaces.layout import Precision

ZERO_GROUPS_SUPPORTED: Final[bool] = True
"""Whether ZeRO's shard groups may be smaller than dp (zero_replicas over 1)."""

PRECISIONS_SUPPORTED: Final[tuple[Precision, ...]] = ("fp32", "bf16")
"""Precisions that it trains in; fp16 needs a loss scaler, which it lacks."""

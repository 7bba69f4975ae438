"""What the embedded trainer can run today: the one place where search spaces learn of it."""

from __future__ import annotations

from typing import Final

from search_spaces.layout import PRECISIONS, Precision

PRECISIONS_SUPPORTED: Final[tuple[Precision, ...]] = PRECISIONS
"""Precisions that it trains in."""

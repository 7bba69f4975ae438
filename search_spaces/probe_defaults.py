"""What a probe does unless its campaign says otherwise (`probe:` in a campaign file)."""

from __future__ import annotations

from typing import Final

DEFAULT_WARMUP: Final = 2
"""Warm-up iterations of a probe."""
DEFAULT_ITERATIONS: Final = 10
DEFAULT_DEADLINE_S: Final = 300.0
"""Seconds after which a probe is ended."""

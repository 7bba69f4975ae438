"""How long something takes, for the benchmarks that time a single call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_s(act: Callable[[], object], *, repeats: int) -> float:
    """Median seconds of so many calls."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)

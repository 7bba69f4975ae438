"""How often something may happen: a bucket of permits for each key, refilled at a steady rate."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from time import monotonic
from typing import Final

MAX_KEYS: Final = 10_000
"""Keys that a throttle remembers; the one that was used longest ago is forgotten first."""


class Throttle:
    """Buckets of permits, one a key. For one thread: the event loop's."""

    def __init__(
        self,
        *,
        per_s: float,
        burst: float,
        max_keys: int = MAX_KEYS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """Hands out permits.

        Args:
            per_s: permits that a key earns a second.
            burst: permits that a key can save, and begins with.
            max_keys: keys that are remembered.
            clock: monotonic seconds.
        """
        self._per_s, self._burst, self._max_keys, self._clock = per_s, burst, max_keys, clock
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, key: Hashable) -> float:
        """Takes a permit; 0 where there was one, else the seconds until there is."""
        permits = self._permits(key)
        if permits < 1:
            return (1 - permits) / self._per_s
        self._keep(key, permits - 1)
        return 0.0

    def give_back(self, key: Hashable) -> None:
        """Returns a permit that was not needed after all."""
        self._keep(key, min(self._burst, self._permits(key) + 1))

    def _permits(self, key: Hashable) -> float:
        if key not in self._buckets:
            return self._burst
        permits, at = self._buckets[key]
        return min(self._burst, permits + (self._clock() - at) * self._per_s)

    def _keep(self, key: Hashable, permits: float) -> None:
        self._buckets[key] = (permits, self._clock())
        self._buckets.move_to_end(key)
        while len(self._buckets) > self._max_keys:
            self._buckets.popitem(last=False)

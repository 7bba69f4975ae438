"""Rate limits of requests and of guesses: a bucket of permits for each key, refilled steadily."""

from __future__ import annotations

import ipaddress
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from time import monotonic
from typing import Final

from layout_tuner.results_db.actor import TokenRole

BURST_S: Final = 2.0
"""A burst may have as many requests as the rate allows in this many seconds."""

_BUSY_ROLES: Final = 10
"""The rate of workers and admins, as a multiple of a viewer's: many workers may share a token."""

MAX_KEYS: Final = 10_000
"""Most keys of a throttle; the one that was used longest ago is removed first."""


GUESSES_PER_S: Final = 0.2
"""Wrong codes per second that an address may send in the long run."""
GUESSES_PER_S_OF_ALL: Final = 20.0
_GUESSES_OF_ALL: Final = 200
"""The limit of all addresses together, which also slows an attacker with many addresses."""
_LOG_LINES_PER_S: Final = 1 / 60
"""Log lines per second about one address."""

_log = logging.getLogger(__name__)


class Throttle:
    """Buckets of permits, one for each key. Not thread-safe: the event loop uses it."""

    def __init__(
        self,
        *,
        per_s: float,
        burst: float,
        max_keys: int = MAX_KEYS,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """A full bucket for every key.

        Args:
            per_s: permits per second that refill a bucket.
            burst: size of a bucket.
            max_keys: most buckets; one that is removed is full when its key is used again.
            clock: monotonic seconds.
        """
        self._per_s, self._burst, self._max_keys, self._clock = per_s, burst, max_keys, clock
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, key: Hashable) -> float:
        """Takes a permit and returns 0; without one, returns the seconds until there is one."""
        permits = self._permits(key)
        if permits < 1:
            return (1 - permits) / self._per_s
        self._keep(key, permits - 1)
        return 0.0

    def give_back(self, key: Hashable) -> None:
        """Returns a permit that was not needed."""
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


class GuessLimit:
    """Limits the guessing of sign-in codes: after some wrong ones an address has to wait.

    Tokens and the secrets of sessions have 256 random bits, so guessing them needs no limit. Not
    thread-safe: the event loop uses it.
    """

    def __init__(self, burst: int, *, clock: Callable[[], float] = monotonic) -> None:
        """An address may send `burst` wrong codes before it has to wait."""
        self._each = Throttle(per_s=GUESSES_PER_S, burst=burst, clock=clock)
        self._all = Throttle(per_s=GUESSES_PER_S_OF_ALL, burst=_GUESSES_OF_ALL, clock=clock)
        self._log_lines = Throttle(per_s=_LOG_LINES_PER_S, burst=1, clock=clock)

    def begin(self, address: str) -> float:
        """The seconds to wait before a code is looked up; 0: it may be looked up now."""
        network = network_of(address)
        wait_s = self._each.take(network)
        if wait_s == 0:
            wait_s = self._all.take("all")
        if wait_s > 0 and self._log_lines.take(network) == 0:
            _log.warning("%s sends wrong sign-in codes; it has to wait between them", network)
        return wait_s

    def was_no_guess(self, address: str) -> None:
        """Reports that the code was right, or could not be looked up; the permit is returned."""
        self._each.give_back(network_of(address))
        self._all.give_back("all")


def make_limits(requests_per_s: float) -> Mapping[TokenRole, Throttle]:
    """The rate limits by role.

    Admins and workers get ten times the requests of a viewer or a submitter.
    """

    def limit(times: int) -> Throttle:
        per_s = requests_per_s * times
        return Throttle(per_s=per_s, burst=max(1.0, per_s * BURST_S))

    few, many = limit(1), limit(_BUSY_ROLES)
    return {"viewer": few, "submitter": few, "admin": many, "worker": many}


def network_of(address: str) -> str:
    """The unit that is limited: an IPv4 address, or the /64 network of an IPv6 address.

    A single host may own a whole /64 network.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket, or a test's client
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address

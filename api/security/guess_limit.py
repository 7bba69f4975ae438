"""Limits the guessing of sign-in codes: after some wrong ones an address has to wait.

Tokens and the secrets of sessions have 256 random bits, so guessing them needs no limit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Final

from api.http.rate_limit import Throttle, network_of

PER_S: Final = 0.2
"""Wrong codes per second that an address may send in the long run."""
BURST_OF_ALL: Final = 200
PER_S_OF_ALL: Final = 20.0
"""The limit of all addresses together, which also slows an attacker with many addresses."""
LOG_LINES_PER_S: Final = 1 / 60
"""Log lines per second about one address."""

_log = logging.getLogger(__name__)


class GuessLimit:
    """Counts wrong codes by address. Not thread-safe: the event loop uses it."""

    def __init__(self, burst: int, *, clock: Callable[[], float] = monotonic) -> None:
        """An address may send `burst` wrong codes before it has to wait."""
        self._each = Throttle(per_s=PER_S, burst=burst, clock=clock)
        self._all = Throttle(per_s=PER_S_OF_ALL, burst=BURST_OF_ALL, clock=clock)
        self._log_lines = Throttle(per_s=LOG_LINES_PER_S, burst=1, clock=clock)

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

"""Limits the guessing of tokens: after some wrong ones an address has to wait between attempts."""

from __future__ import annotations

import ipaddress
import logging
from collections import OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import Final

from api.security.rate_limit import MAX_KEYS, Throttle

PER_S: Final = 0.2
"""Wrong tokens per second that an address may send in the long run."""
BURST_OF_ALL: Final = 200
PER_S_OF_ALL: Final = 20.0
"""The limit of all addresses together, which also slows an attacker with many addresses."""
LOG_LINES_PER_S: Final = 1 / 60
"""Log lines per second about one address."""

_log = logging.getLogger(__name__)


class Guesses:
    """Counts wrong tokens by address. Not thread-safe: the event loop uses it.

    A token that was valid from an address needs no permit there again, so users are not locked out
    by somebody who guesses behind the same address.
    """

    def __init__(self, burst: int, *, clock: Callable[[], float] = monotonic) -> None:
        """An address may send `burst` wrong tokens before it has to wait."""
        self._each = Throttle(per_s=PER_S, burst=burst, clock=clock)
        self._all = Throttle(per_s=PER_S_OF_ALL, burst=BURST_OF_ALL, clock=clock)
        self._right: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._log_lines = Throttle(per_s=LOG_LINES_PER_S, burst=1, clock=clock)

    def begin(self, address: str, hashed: str) -> float:
        """The seconds to wait before the token is looked up; 0: it may be looked up now."""
        network = network_of(address)
        if (network, hashed) in self._right:
            return 0.0
        wait_s = self._each.take(network)
        if wait_s == 0:
            wait_s = self._all.take("all")
        if wait_s > 0 and self._log_lines.take(network) == 0:
            _log.warning("%s sends wrong tokens; it has to wait between them", network)
        return wait_s

    def was_right(self, address: str, hashed: str) -> None:
        """Reports that the token was valid."""
        key = (network_of(address), hashed)
        if key in self._right:
            self._right.move_to_end(key)
            return
        self._give_back(key[0])
        self._right[key] = None
        while len(self._right) > MAX_KEYS:
            self._right.popitem(last=False)

    def was_not_judged(self, address: str, hashed: str) -> None:
        """Reports that the token could not be looked up; the permit is returned."""
        network = network_of(address)
        if (network, hashed) not in self._right:
            self._give_back(network)

    def was_wrong(self, address: str, hashed: str) -> None:
        """Reports that the token was not valid."""
        self._right.pop((network_of(address), hashed), None)

    def _give_back(self, network: str) -> None:
        self._each.give_back(network)
        self._all.give_back("all")


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

"""Slows whoever guesses tokens: after some wrong ones an address has to wait, ever so often."""

from __future__ import annotations

import ipaddress
import logging
from collections import OrderedDict
from collections.abc import Callable
from time import monotonic
from typing import Final

from api.throttle import MAX_KEYS, Throttle

PER_S: Final = 0.2
"""Wrong tokens a second that an address may send in the long run."""
BURST_OF_ALL: Final = 200
PER_S_OF_ALL: Final = 20.0
"""The same for all addresses together: who has many of them, or a whole network, waits too."""
_SAID_EVERY_S: Final = 60.0

_log = logging.getLogger(__name__)


class Guesses:
    """Counts wrong tokens by address. For one thread: the event loop's.

    A token that was right from an address is asked for no permit there again: whoever works is not
    locked out by somebody who guesses behind the same address.
    """

    def __init__(self, burst: int, *, clock: Callable[[], float] = monotonic) -> None:
        """Lets an address send `burst` wrong tokens before it has to wait."""
        self._clock = clock
        self._each = Throttle(per_s=PER_S, burst=burst, clock=clock)
        self._all = Throttle(per_s=PER_S_OF_ALL, burst=BURST_OF_ALL, clock=clock)
        self._right: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._said_at: OrderedDict[str, float] = OrderedDict()

    def begin(self, address: str, hashed: str) -> float:
        """Before a token is looked up: 0, or the seconds to wait with it."""
        network = network_of(address)
        if (network, hashed) in self._right:
            return 0.0
        wait_s = self._each.take(network)
        if wait_s == 0:
            wait_s = self._all.take("all")
        if wait_s > 0:
            self._say(network)
        return wait_s

    def was_right(self, address: str, hashed: str) -> None:
        """The token was valid: it was no guess."""
        key = (network_of(address), hashed)
        if key in self._right:
            self._right.move_to_end(key)
            return
        self._give_back(key[0])
        self._right[key] = None
        while len(self._right) > MAX_KEYS:
            self._right.popitem(last=False)

    def was_not_judged(self, address: str, hashed: str) -> None:
        """Nobody could say whether the token is valid: whoever holds one does not wait for that later."""
        network = network_of(address)
        if (network, hashed) not in self._right:
            self._give_back(network)

    def was_wrong(self, address: str, hashed: str) -> None:
        """The token is not valid, or not any more."""
        self._right.pop((network_of(address), hashed), None)

    def _give_back(self, network: str) -> None:
        self._each.give_back(network)
        self._all.give_back("all")

    def _say(self, network: str) -> None:
        now = self._clock()
        if now - self._said_at.get(network, now - _SAID_EVERY_S) < _SAID_EVERY_S:
            return
        self._said_at[network] = now
        self._said_at.move_to_end(network)
        while len(self._said_at) > MAX_KEYS:
            self._said_at.popitem(last=False)
        _log.warning("%s sends wrong tokens; it has to wait between them", network)


def network_of(address: str) -> str:
    """What counts as one address: of IPv6 a network of 64 bits, which one host may have to itself."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # a Unix socket, or a test
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address

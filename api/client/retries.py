"""When a request is sent again, and after how long."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Final

import httpx

from api.client.call import Call
from search_spaces.pinned_certificate import why_distrusted

_UNHEARD: Final = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
"""Errors before the service can have heard anything: whatever was asked may be asked again."""

_HOPELESS: Final = (httpx.UnsupportedProtocol, httpx.LocalProtocolError)
"""Errors of ours: the next time would be the same."""

_PASSING: Final = frozenset({502, 503, 504})
"""Statuses of a service, or of a proxy before it, that is away for a moment."""

_TOO_MANY: Final = 429
"""Status of a request that was turned away unread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How patient a client is.

    Sent again is only what may be: what the service cannot have heard or has turned away unread, and
    calls for which twice is once (`Call.is_repeatable`).
    """

    attempts: int = 3
    """How often a request is sent at most."""
    first_pause_s: float = 0.1
    """Longest pause before the second time; it doubles with each time."""
    longest_pause_s: float = 10.0
    """Longest pause. A service that asks for a longer one (`Retry-After`) is not asked again."""

    def pause_after_error(
        self, call: Call[Any], attempt: int, error: httpx.TransportError
    ) -> float | None:
        """Seconds until a call that got no answer is sent again; None: it is not."""
        if isinstance(error, _HOPELESS) or why_distrusted(error) is not None:
            return None
        return self._pause_s(attempt) if call.is_repeatable or isinstance(error, _UNHEARD) else None

    def pause_after_answer(
        self, call: Call[Any], attempt: int, answer: httpx.Response
    ) -> float | None:
        """Seconds until a call that was answered is sent again; None: that is the answer."""
        status = answer.status_code
        if status != _TOO_MANY and not (status in _PASSING and call.is_repeatable):
            return None
        asked_s = _retry_after_s(answer)
        pause_s = self._pause_s(attempt)
        if pause_s is None or asked_s > self.longest_pause_s:
            return None
        return max(pause_s, asked_s)

    def pause_after_end(self, times: int) -> float | None:
        """Seconds until a stream that ended as soon as it began, so often in a row, is asked for again.

        None: it is not.
        """
        return self._pause_s(times)

    def _pause_s(self, attempt: int) -> float | None:
        if attempt >= self.attempts:
            return None
        longest_s = min(self.first_pause_s * 2.0 ** (attempt - 1), self.longest_pause_s)
        # Clients that were cut off together are not to come back together.
        return longest_s * random.uniform(0.5, 1.0)  # noqa: S311 - nobody gains from guessing it


DEFAULT_RETRIES: Final = Retries()
NO_RETRIES: Final = Retries(attempts=1)
"""Everything is sent once."""


def _retry_after_s(answer: httpx.Response) -> float:
    """What the service asks for, in whole seconds as it writes them; 0 where it does not."""
    asked = answer.headers.get("Retry-After", "")
    return float(asked) if asked.isascii() and asked.isdigit() else 0.0

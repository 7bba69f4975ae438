"""The open event streams of a process: their shares by token, and their end with the token.

A stream ends within 3 s after its token was revoked or has expired, or its session has ended: at
most 1.2 `CHECK_INTERVAL_S` until the next check, two queries for all streams, and `CLOSING_S` to
tell the client. In the process where the change was made, the check is made at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from layout_tuner.api.background_loops import aligned_pause_s, attempt, wait_for
from layout_tuner.api.errors import WatchersTooManyError
from layout_tuner.api.security.authentication import Authentication, Credential
from layout_tuner.protocol.connection.outage_log import OutageLog

CHECK_INTERVAL_S: Final = 1.0
"""Seconds between two checks of the tokens and sessions of all streams."""

CLOSING_S: Final = 1.0
"""Seconds for which the service tries to tell a client why its stream ends."""

NOT_VALID: Final = "the token is not valid any more: it was revoked, or has expired"
DISPLACED: Final = "all streams are in use, this token has the most, and another token needs one"

_log = logging.getLogger(__name__)


class OpenStreams:
    """Admits streams, and tells them when to end. Not thread-safe: the event loop uses it."""

    def __init__(self, authentication: Authentication, max_streams: int) -> None:
        self._authentication, self._max_streams = authentication, max_streams
        self._open: dict[asyncio.Future[str], Credential] = {}
        """The streams, the oldest first; a result is the reason why a stream must end."""
        self._wanted = asyncio.Event()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def admitted(self, credential: Credential) -> Iterator[asyncio.Future[str]]:
        """Counts a stream from its beginning to its end; yields the reason why it must end.

        If there are too many, the token with the most streams loses its oldest one to a token that
        has at least two fewer; otherwise this raises WatchersTooManyError. Sessions count as their
        token.
        """
        self._make_room(credential.token_hash)
        if not self._open:
            self._wanted.set()  # from here on the checks have an interval
        ended = asyncio.get_running_loop().create_future()
        self._open[ended] = credential
        try:
            yield ended
        finally:
            del self._open[ended]

    def check_soon(self) -> None:
        """Checks all streams now, because a token or a session was ended."""
        self._wanted.set()

    async def run(self) -> None:
        """Checks again and again, while there are streams, until cancelled."""
        outage = OutageLog(_log, "checking the tokens of event streams")
        loop = asyncio.get_running_loop()
        while True:
            pause_s = aligned_pause_s(loop.time(), CHECK_INTERVAL_S) if self._open else None
            await wait_for(self._wanted, pause_s)
            self._wanted.clear()
            # During an outage of the database the streams continue.
            await attempt(self._check, outage, "no token of an event stream was checked")

    async def _check(self) -> None:
        checked = self._going_on()
        valid = await self._authentication.valid_ones({credential for _, credential in checked})
        for ended, credential in checked:
            if credential not in valid and not ended.done():
                ended.set_result(NOT_VALID)

    def _make_room(self, token_hash: str) -> None:
        going_on = self._going_on()
        if len(going_on) < self._max_streams:
            return
        num_of = Counter(credential.token_hash for _, credential in going_on)
        largest, most = num_of.most_common(1)[0]
        if num_of[token_hash] + 2 > most:
            raise WatchersTooManyError(
                f"{len(going_on)} watch live events already, which is the most that a process serves, and "
                f"{num_of[token_hash]} of them have this token; try again later, or poll the page"
            )
        next(each for each, of in going_on if of.token_hash == largest).set_result(DISPLACED)

    def _going_on(self) -> list[tuple[asyncio.Future[str], Credential]]:
        """The streams that have not been asked to end."""
        return [(ended, of) for ended, of in self._open.items() if not ended.done()]

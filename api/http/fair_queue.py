"""Turns of tokens: one token's work does not keep the work of others waiting."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class FairQueue:
    """Starts waiting work in turn by token, and runs one piece of work of each token at a time.

    Not thread-safe: the event loop uses it.
    """

    def __init__(self, *, at_once: int) -> None:
        """At most `at_once` pieces of work run at the same time, each of another token."""
        self._at_once = at_once
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """In the order of turns, without the tokens that have one now."""
        self._working: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """What else waits of each token that has a turn."""

    @asynccontextmanager
    async def turn(self, token: Hashable) -> AsyncIterator[None]:
        """Waits for a turn of the token, which lasts as long as the block."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._working.get(token)
        (self._waiting.setdefault(token, deque()) if waiting is None else waiting).append(begun)
        self._start_waiting()
        try:
            await begun
            yield
        finally:
            if not begun.cancelled():
                # The token's next turn comes after one of each token that waits already.
                if left := self._working.pop(token):
                    self._waiting[token] = left
                self._start_waiting()

    def _start_waiting(self) -> None:
        while self._waiting and len(self._working) < self._at_once:
            token = next(iter(self._waiting))
            waiting = self._waiting.pop(token)
            while waiting:
                begun = waiting.popleft()
                if not begun.cancelled():
                    self._working[token] = waiting
                    begun.set_result(None)
                    break

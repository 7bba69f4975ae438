"""The holders of tokens: cached for a second, and the times of their last use."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Final

from starlette.concurrency import run_in_threadpool

from api.service.background_jobs import in_background
from results_db.access.actor import TokenRole
from results_db.access.tokens import LOCAL_ADMIN, LOCAL_WORKER, TokenRecord, hash_of_token
from results_db.database.outage_log import LoopOutage
from results_db.database.store_base import Clock, utc_now
from results_db.store import Store

BELIEVED_FOR_S: Final = 1.0
"""Seconds for which an answer of the database is used: revocation by another process may take that
long to be noticed."""

MAX_REMEMBERED: Final = 4096
"""Cached tokens; the one that was used longest ago is removed first."""

NOTED_EVERY_S: Final = 30.0
"""Seconds between two updates of the times of last use."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The holder of a token."""

    name: str
    role: TokenRole
    token_id: int | None = None
    """None: the token is in a file of the data directory."""
    expires_at: datetime | None = None


def local_holders(admin_token: str, worker_token: str | None) -> Mapping[str, Holder]:
    """The holders of the tokens in the data directory's files, by the hash of the token."""
    holders = {hash_of_token(admin_token.encode()): Holder(name=LOCAL_ADMIN, role="admin")}
    if worker_token is not None:
        hashed = hash_of_token(worker_token.encode())
        holders[hashed] = Holder(name=LOCAL_WORKER, role="worker")
    return holders


@dataclass(kw_only=True, slots=True)
class _Belief:
    holder: Holder
    since: float
    """Monotonic seconds."""


class TokenBook:
    """Finds the holder of a token. Not thread-safe: the event loop uses it."""

    def __init__(
        self,
        store: Store,
        local: Mapping[str, Holder],
        *,
        clock: Clock = utc_now,
        ticks: Callable[[], float] = monotonic,
    ) -> None:
        """Reads tokens from the store, except those of the data directory.

        Args:
            store: holds the tokens.
            local: the other holders, by the hash of their token.
            clock: decides whether a token has expired.
            ticks: monotonic seconds.
        """
        self._store, self._local, self._clock, self._ticks = store, local, clock, ticks
        self._beliefs: OrderedDict[str, _Belief] = OrderedDict()
        self._used: set[int] = set()
        self._num_forgotten = 0

    async def find(self, hashed: str) -> Holder | None:
        """The holder of the token with this hash; None if the token is not valid.

        Raises:
            DatabaseUnavailableError: the database cannot be asked.
        """
        holder = self._local.get(hashed) or await self._find(hashed)
        if holder is None or (holder.expires_at and self._clock() >= holder.expires_at):
            return None
        if holder.token_id is not None:
            self._used.add(holder.token_id)
        return holder

    def forget(self, token_id: int) -> None:
        """Removes a token from the cache, because it was revoked."""
        self._num_forgotten += 1
        for hashed, belief in list(self._beliefs.items()):
            if belief.holder.token_id == token_id:
                del self._beliefs[hashed]

    def take_uses(self) -> set[int]:
        """The ids of the tokens that were used since the previous call."""
        used, self._used = self._used, set()
        return used

    async def _find(self, hashed: str) -> Holder | None:
        belief = self._beliefs.get(hashed)
        now = self._ticks()
        if belief is not None:
            if now - belief.since < BELIEVED_FOR_S:
                return belief.holder
            # Concurrent requests use the old answer: one query a second for any number of them.
            belief.since = now
        forgotten = self._num_forgotten
        record = await run_in_threadpool(self._store.token_by_hash, hashed)
        holder = _holder(record)
        if holder is None:
            self._beliefs.pop(hashed, None)
        elif forgotten == self._num_forgotten:  # else it may have been revoked during the query
            self._beliefs[hashed] = _Belief(holder=holder, since=now)
            self._beliefs.move_to_end(hashed)
            while len(self._beliefs) > MAX_REMEMBERED:
                self._beliefs.popitem(last=False)
        return holder


def _holder(record: TokenRecord | None) -> Holder | None:
    if record is None or record.revoked_at is not None:
        return None
    return Holder(
        name=record.name, role=record.role, token_id=record.id, expires_at=record.expires_at
    )


@asynccontextmanager
async def noting_uses(book: TokenBook, store: Store) -> AsyncIterator[None]:
    """Stores the times of last use in the background while the block runs, and at its end."""
    outage = LoopOutage(_log, "noting when tokens are used")

    async def note() -> None:
        used = book.take_uses()
        try:
            if used:
                await run_in_threadpool(store.note_tokens_used, used)
        except Exception as error:
            outage.failed("when tokens were last used could not be kept", error)
        else:
            outage.worked()

    async def note_repeatedly() -> None:
        while True:
            await asyncio.sleep(NOTED_EVERY_S)
            await note()

    try:
        async with in_background(note_repeatedly()):
            yield
    finally:
        await note()

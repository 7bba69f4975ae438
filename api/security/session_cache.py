"""The sessions of browsers: cached for a second, and which of them were used."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from time import monotonic
from typing import Final

from starlette.concurrency import run_in_threadpool

from api.security.brief_cache import BriefCache
from results_db.access.sign_ins import SESSION_IDLE_LIFE, BrowserSession
from results_db.store import Store

RENEWED_EVERY: Final = timedelta(minutes=5)
"""Precision of a session's last use."""


class SessionBook:
    """Finds the token that a session stands for. Not thread-safe: the event loop uses it."""

    def __init__(self, store: Store, *, ticks: Callable[[], float] = monotonic) -> None:
        """Reads sessions from the store.

        Args:
            store: holds the sessions; its clock decides whether a session has expired.
            ticks: monotonic seconds.
        """
        self._store = store
        self._cache: BriefCache[BrowserSession] = BriefCache(
            lambda hashed: store.sign_ins.session_by_hash(hashed), ticks=ticks
        )
        self._used: set[str] = set()

    async def find(self, secret_hash: str) -> str | None:
        """The hash of the token that a session stands for; None if the session is not valid.

        Raises:
            DatabaseUnavailableError: the database cannot be asked.
        """
        session = await self._cache.find(secret_hash)
        now = self._store.now()
        if session is None or now >= session.expires_at:
            return None
        if session.expires_at - now < SESSION_IDLE_LIFE - RENEWED_EVERY:
            self._used.add(secret_hash)
        return session.token_hash

    async def valid_ones(self, hashes: set[str]) -> set[str]:
        """Those of the hashes whose session is valid now; the database is asked once for all."""
        return set(
            await run_in_threadpool(self._store.sign_ins.sessions_by_hash, hashes) if hashes else ()
        )

    def forget(self, secret_hash: str) -> None:
        """Removes a session from the cache, because it was ended."""
        self._cache.forget_hash(secret_hash)
        self._used.discard(secret_hash)

    def take_uses(self) -> set[str]:
        """The hashes of the sessions to renew, because they were used since the previous call."""
        used, self._used = self._used, set()
        return used

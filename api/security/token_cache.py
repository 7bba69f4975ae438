"""Who holds a token: looked up once a second at most, whatever is asked of the service."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Final

from starlette.concurrency import run_in_threadpool

from results_db.access_records import TokenRecord
from results_db.actor import TokenRole
from results_db.part import Clock, utc_now
from results_db.store import Store
from results_db.tokens import LOCAL_ADMIN, LOCAL_WORKER, hash_of_token

BELIEVED_FOR_S: Final = 1.0
"""Seconds for which an answer of the database stands: how long another process's revocation may take."""

MAX_REMEMBERED: Final = 4096
"""Tokens that are remembered; the one that was used longest ago is forgotten first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Whoever holds a token."""

    name: str
    role: TokenRole
    token_id: int | None = None
    """None: it stands in a file of the data directory."""
    expires_at: datetime | None = None


def local_holders(admin_token: str, worker_token: str | None) -> Mapping[str, Holder]:
    """The tokens in the data directory's files, by their hashes."""
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
    """Knows who holds which token. For one thread: the event loop's."""

    def __init__(
        self,
        store: Store,
        local: Mapping[str, Holder],
        *,
        clock: Clock = utc_now,
        ticks: Callable[[], float] = monotonic,
    ) -> None:
        """Looks tokens up in the store, but for those of the data directory.

        Args:
            store: that has the tokens.
            local: holders by the hash of their token.
            clock: tells when tokens expire.
            ticks: monotonic seconds.
        """
        self._store, self._local, self._clock, self._ticks = store, local, clock, ticks
        self._beliefs: OrderedDict[str, _Belief] = OrderedDict()
        self._used: set[int] = set()
        self._num_forgotten = 0

    async def find(self, hashed: str) -> Holder | None:
        """Who holds the token with this hash; None where it is not valid (any more).

        Raises:
            DatabaseUnavailableError: nobody can say just now.
        """
        holder = self._local.get(hashed) or await self._find(hashed)
        if holder is None or (holder.expires_at and self._clock() >= holder.expires_at):
            return None
        if holder.token_id is not None:
            self._used.add(holder.token_id)
        return holder

    def forget(self, token_id: int) -> None:
        """Believes nothing of a token any more: it was revoked."""
        self._num_forgotten += 1
        for hashed, belief in list(self._beliefs.items()):
            if belief.holder.token_id == token_id:
                del self._beliefs[hashed]

    def take_uses(self) -> set[int]:
        """The ids of the tokens that were used since this was asked last."""
        used, self._used = self._used, set()
        return used

    async def _find(self, hashed: str) -> Holder | None:
        belief = self._beliefs.get(hashed)
        now = self._ticks()
        if belief is not None:
            if now - belief.since < BELIEVED_FOR_S:
                return belief.holder
            # Whoever asks meanwhile goes by the old answer: one look-up a second, however many ask.
            belief.since = now
        forgotten = self._num_forgotten
        record = await run_in_threadpool(self._store.token_by_hash, hashed)
        holder = _holder(record)
        if holder is None:
            self._beliefs.pop(hashed, None)
        elif forgotten == self._num_forgotten:  # else it may have been revoked while we read it
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

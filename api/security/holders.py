"""The holders of tokens and of browsers' sessions, and the times of their last use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from starlette.concurrency import run_in_threadpool

from layout_tuner.api.background_loops import attempt, in_background
from layout_tuner.protocol.connection.outage_log import OutageLog
from layout_tuner.results_db.access.browser_sessions import SESSION_IDLE_LIFE
from layout_tuner.results_db.access.tokens import (
    LOCAL_ADMIN,
    LOCAL_WORKER,
    TokenRecord,
    hash_of_token,
)
from layout_tuner.results_db.actor import TokenRole
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.rows import record_of
from layout_tuner.results_db.store import Store

NOTED_EVERY_S: Final = 30.0
"""Seconds between two updates of the times of last use."""

RENEWED_EVERY: Final = timedelta(minutes=5)
"""Precision of a session's last use."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The holder of a token."""

    name: str
    role: TokenRole
    owner: str
    """The owner whom it acts for."""
    token_id: int | None = None
    """None: the token is in a file of the data directory."""
    expires_at: datetime | None = None
    ends_at: datetime | None = None
    """Of a short token, the end of its sign-in by `login --device`."""
    source: str | None = None
    """The issuer, or the header of a proxy, that names the owner; None: the token does."""

    @property
    def is_admin(self) -> bool:
        return self.role == "admin"

    @property
    def may_submit(self) -> bool:
        return self.role in ("submitter", "admin")

    def may_change(self, campaign: CampaignRecord) -> bool:
        """Whether it may change a campaign and its trials; pages have buttons for this alone."""
        return self.is_admin or (self.role == "submitter" and self.owner == campaign.created_by)


def local_holders(admin_token: str, worker_token: str | None) -> Mapping[str, Holder]:
    """The holders of the tokens in the data directory's files, by the hash of the token."""
    holders = {
        hash_of_token(admin_token.encode()): Holder(
            name=LOCAL_ADMIN, owner=LOCAL_ADMIN, role="admin"
        )
    }
    if worker_token is not None:
        hashed = hash_of_token(worker_token.encode())
        holders[hashed] = Holder(name=LOCAL_WORKER, owner=LOCAL_WORKER, role="worker")
    return holders


class TokenBook:
    """Finds the holder of a token. Not thread-safe: the event loop uses it."""

    def __init__(self, store: Store, local: Mapping[str, Holder]) -> None:
        """Reads tokens from the store, except those of the data directory."""
        self._store, self._local = store, local
        self._used: set[int] = set()

    async def find(self, hashed: str) -> Holder | None:
        """The holder of the token with this hash; None if the token is not valid.

        Raises DatabaseUnavailableError if the database cannot be asked.
        """
        found = self._local.get(hashed)
        if found is None:
            record = await run_in_threadpool(self._store.access.token_by_hash, hashed)
            if record and record.allowed_by and not await self.find(record.allowed_by):
                return None
            found = _holder(record)
        return self._unexpired(found)

    async def valid_ones(self, hashes: set[str]) -> set[str]:
        """Those of the hashes whose token is valid now; the database is asked once for all."""
        asked = hashes - self._local.keys()
        found = await run_in_threadpool(self._store.access.tokens_by_hash, asked) if asked else {}
        valid = {hashed for hashed, each in found.items() if self._unexpired(_holder(each))}
        if allowing := {each.allowed_by for each in found.values() if each.allowed_by}:
            ended = allowing - await self.valid_ones(allowing)
            valid = {hashed for hashed in valid if found[hashed].allowed_by not in ended}
        return valid | (hashes - asked)

    def _unexpired(self, holder: Holder | None) -> Holder | None:
        """The holder unless its time is over; notes that its token was used."""
        if holder is None or (holder.expires_at and self._store.now() >= holder.expires_at):
            return None
        if holder.token_id is not None:
            self._used.add(holder.token_id)
        return holder

    def take_uses(self) -> set[int]:
        """The ids of the tokens that were used since the previous call."""
        used, self._used = self._used, set()
        return used


class SessionBook:
    """Finds the token of a session. Not thread-safe: the event loop uses it."""

    def __init__(self, store: Store) -> None:
        """Reads sessions from the store, whose clock decides whether a session has expired."""
        self._store = store
        self._used: set[str] = set()

    async def find(self, secret_hash: str) -> str | None:
        """The hash of the token that a session stands for; None if the session is not valid.

        Raises DatabaseUnavailableError if the database cannot be asked.
        """
        session = await run_in_threadpool(self._store.sign_ins.session_by_hash, secret_hash)
        if session is None:
            return None
        if session.expires_at - self._store.now() < SESSION_IDLE_LIFE - RENEWED_EVERY:
            self._used.add(secret_hash)
        return session.token_hash

    async def valid_ones(self, hashes: set[str]) -> set[str]:
        """Those of the hashes whose session is valid now; the database is asked once for all."""
        return set(
            await run_in_threadpool(self._store.sign_ins.sessions_by_hash, hashes) if hashes else ()
        )

    def take_uses(self) -> set[str]:
        """The hashes of the sessions to renew, because they were used since the previous call."""
        used, self._used = self._used, set()
        return used


def _holder(record: TokenRecord | None) -> Holder | None:
    if record is None or record.revoked_at is not None:
        return None
    name = record.owner if record.source else record.name
    return record_of(Holder, record, token_id=record.id, name=name)


@asynccontextmanager
async def noting_uses(book: TokenBook, sessions: SessionBook, store: Store) -> AsyncIterator[None]:
    """Stores the times of last use in the background while the block runs, and at its end."""
    outage = OutageLog(_log, "noting when tokens and sessions are used")
    problem = "when tokens and sessions were last used could not be kept"

    def write(used: set[int], used_sessions: set[str]) -> None:
        if used:
            store.access.note_tokens_used(used)
        if used_sessions:
            store.sign_ins.renew_sessions(used_sessions)

    async def note() -> None:
        used, used_sessions = book.take_uses(), sessions.take_uses()
        if used or used_sessions:
            await run_in_threadpool(write, used, used_sessions)

    async def note_repeatedly() -> None:
        while True:
            await asyncio.sleep(NOTED_EVERY_S)
            await attempt(note, outage, problem)

    try:
        async with in_background(note_repeatedly()):
            yield
    finally:
        await attempt(note, outage, problem)

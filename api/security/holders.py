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
from layout_tuner.results_db.access.sign_ins import (
    SESSION_IDLE_LIFE,
    SESSION_LIFE,
    BrowserSession,
    hash_of_owner,
)
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
            if record and (by := _allowed_by(record)) and not await self.find(by):
                return None
            found = _holder(record)
        return self._unexpired(found)

    async def valid_ones(self, hashes: set[str]) -> set[str]:
        """Those of the hashes whose token is valid now; the database is asked once for all."""
        asked = hashes - self._local.keys()
        found = await run_in_threadpool(self._store.access.tokens_by_hash, asked) if asked else {}
        valid = {hashed for hashed, each in found.items() if self._unexpired(_holder(each))}
        if allowing := {by for each in found.values() if (by := _allowed_by(each))}:
            ended = allowing - await self.valid_ones(allowing)
            valid = {hashed for hashed in valid if _allowed_by(found[hashed]) not in ended}
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
    """Finds the token or the owner of a session. Not thread-safe: the event loop uses it."""

    def __init__(self, store: Store) -> None:
        """Reads sessions from the store, whose clock decides whether a session has expired."""
        self._store = store
        self._used: set[str] = set()

    async def find(self, secret_hash: str) -> BrowserSession | None:
        """The session with this hash; None if it is not valid.

        Raises DatabaseUnavailableError if the database cannot be asked.
        """
        session = await run_in_threadpool(self._store.sign_ins.session_by_hash, secret_hash)
        if session is None:
            return None
        if session.expires_at - self._store.now() < SESSION_IDLE_LIFE - RENEWED_EVERY:
            self._used.add(secret_hash)
        return session

    async def valid_ones(self, hashes: set[str]) -> set[str]:
        """Those of the hashes whose session is valid now; the database is asked once for all."""
        return set(
            await run_in_threadpool(self._store.sign_ins.sessions_by_hash, hashes) if hashes else ()
        )

    def take_uses(self) -> set[str]:
        """The hashes of the sessions to renew, because they were used since the previous call."""
        used, self._used = self._used, set()
        return used


def holder_of_owner(session: BrowserSession) -> Holder:
    """The holder of a session without a token."""
    assert session.owner
    assert session.role
    until = session.created_at + SESSION_LIFE
    return Holder(name=session.owner, owner=session.owner, role=session.role, expires_at=until)


def _allowed_by(record: TokenRecord) -> str | None:
    """The hash of the token that has to be valid, too: that behind the session that allowed this.

    None: there is none, also where the session was an owner's, without a token; an owner's sign-out
    by an administrator revokes those (`SignIns.end_sessions_of`).
    """
    return None if record.allowed_by == hash_of_owner(record.owner) else record.allowed_by


def _holder(record: TokenRecord | None) -> Holder | None:
    if record is None or record.revoked_at is not None:
        return None
    return record_of(Holder, record, token_id=record.id)


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

"""Sign-ins of browsers: one-time codes, and the sessions that they are exchanged for.

Both are 256 random bits, of which the database keeps the SHA-256, as of tokens. A row stands for a
token: it has the hash of the token, not its name or role, so that a session is never worth more
than the token is at the moment. Tokens in files of the data directory are not in the database;
their hashes are, in these rows. A session that a provider or a proxy vouches for has no token: its
row has the owner and the role that the sign-in gave.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Literal

from sqlalchemy import Delete, Select, delete, or_, select, update
from sqlalchemy.orm import Session

from layout_tuner.results_db.access.tokens import CODE_LIFE, hash_of_token, note_owner
from layout_tuner.results_db.actor import TokenRole
from layout_tuner.results_db.database.database import rows_deleted
from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.errors import OwnerNotFoundError
from layout_tuner.results_db.models.service_tables import BrowserSignIn, OwnerRow, TokenRow
from layout_tuner.results_db.rows import record_of

_Kind = Literal["code", "session"]

SESSION_IDLE_LIFE: Final = timedelta(hours=12)
"""Lifetime of a sign-in after its last use."""

SESSION_LIFE: Final = timedelta(days=7)
"""Lifetime of a sign-in at most."""

MAX_OF_TOKEN: Final = 1000
"""Codes, and sessions, that a token has at once; the one that ends first is deleted for a new one.
Without a limit, one token could fill the table."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BrowserSession:
    """A session, without its secret."""

    token_hash: str
    created_at: datetime
    expires_at: datetime
    """Moves with each use, up to `SESSION_LIFE` after `created_at`."""
    owner: str | None
    """None: the session stands for its token."""
    role: TokenRole | None
    source: str | None
    """The issuer, or the header of a proxy, that signed the owner in."""
    id_token: str | None
    """Names the session to the provider at sign-out; None: the header of a proxy."""


class SignIns(StoreSection):
    """The store's methods for codes and sessions."""

    def create_code(self, token_hash: str) -> tuple[str, datetime]:
        """Creates a code for the holder of a token; returns it and when it expires."""
        now = self._clock()
        with self._db.write() as session:
            code = _add(session, "code", token_hash, now, now + CODE_LIFE)
            self._audit(session, "sign_in.code", "session", self._actor.name)
        return code, now + CODE_LIFE

    def token_of_code(self, code_hash: str) -> str | None:
        """The hash of the token that a code stands for; None: there is no such code any more."""
        query = _valid("code", (code_hash,), self._clock())
        return self._scalar(query.with_only_columns(BrowserSignIn.token_hash))

    @retried
    def exchange_code(self, code_hash: str) -> str | None:
        """Exchanges a code for a session; returns its secret. None: there is no such code any more.

        Of several exchanges of one code, in any number of processes, one gets a session: the one
        whose transaction deletes the row.
        """
        now = self._clock()
        with self._db.write() as session:
            row = session.execute(
                select(BrowserSignIn.token_hash, BrowserSignIn.expires_at).where(
                    BrowserSignIn.secret_hash == code_hash, BrowserSignIn.kind == "code"
                )
            ).one_or_none()
            if row is None or not rows_deleted(session, _row(code_hash)) or row.expires_at <= now:
                return None
            return self._begin_session(session, row.token_hash, now, by="code")

    def create_session(self, token_hash: str) -> str:
        """Creates a session for the holder of a token; returns its secret."""
        with self._db.write() as session:
            return self._begin_session(session, token_hash, self._clock(), by="token")

    @retried
    def create_owner_session(
        self,
        by: Literal["oidc", "header"],
        owner: str,
        details: dict[str, Any],
        columns: dict[str, Any],
    ) -> str:
        """Creates a session for an owner without a token; returns its secret.

        `columns` are the role, the source and the ID token, as in `BrowserSession`.
        """
        now = self._clock()
        with self._db.write() as session:
            note_owner(session, owner, now, self._actor.name)
            hashed = hash_of_owner(owner)
            secret = self._begin_session(session, hashed, now, by=by, owner=owner, **columns)
            self._audit(session, f"sign_in.{by}", "session", owner, **details)
            return secret

    def note_refusal(self, source: str, reason: str) -> None:
        """Records in the audit log that a sign-in by a provider or a header was refused."""
        with self._db.write() as session:
            self._audit(session, "sign_in.refused", "session", source[:255], reason=reason[:500])

    @retried
    def end_sessions_of(self, owner: str) -> int:
        """Ends an owner's sessions, those of tokens too, and codes; returns how many.

        It also ends the command lines that the owner's own sessions allowed.

        Raises OwnerNotFoundError if there is no owner of this name.
        """
        of_tokens = select(TokenRow.secret_hash).where(TokenRow.owner == owner)
        of_owner = or_(BrowserSignIn.owner == owner, BrowserSignIn.token_hash.in_(of_tokens))
        with self._db.write() as session:
            if session.get(OwnerRow, owner) is None:
                raise OwnerNotFoundError(
                    f"there is no owner {owner[:80]!r}; `layout-tuner owner list` has all of them"
                )
            number = rows_deleted(session, delete(BrowserSignIn).where(of_owner))
            # Command lines that such a session allowed have no token that could be revoked.
            allowed = TokenRow.allowed_by == hash_of_owner(owner)
            session.execute(
                update(TokenRow)
                .where(allowed, TokenRow.revoked_at.is_(None))
                .values(revoked_at=self._clock())
            )
            self._audit(session, "owner.sign_out", "owner", owner, sessions=number)
            return number

    def session_by_hash(self, secret_hash: str) -> BrowserSession | None:
        """The session with this hash; None: it never existed, or has ended."""
        return self.sessions_by_hash((secret_hash,)).get(secret_hash)

    def sessions_by_hash(self, secret_hashes: Collection[str]) -> dict[str, BrowserSession]:
        """Those of these sessions that exist and have not ended."""
        with self._db.read() as session:
            rows = session.scalars(_valid("session", secret_hashes, self._clock()))
            return {row.secret_hash: record_of(BrowserSession, row) for row in rows}

    @retried
    def renew_sessions(self, secret_hashes: Collection[str]) -> None:
        """Records that these sessions were used now."""
        now = self._clock()
        with self._db.write() as session:
            # Locked in one order, so that two processes cannot deadlock.
            query = _valid("session", secret_hashes, now).order_by(BrowserSignIn.secret_hash)
            for row in session.scalars(query.with_for_update()):
                row.expires_at = min(now + SESSION_IDLE_LIFE, row.created_at + SESSION_LIFE)

    def end_session(self, secret_hash: str) -> str | None:
        """Ends a session; returns its ID token. Ending it again changes nothing."""
        with self._db.write() as session:
            row = session.get(BrowserSignIn, secret_hash)
            id_token = None if row is None else row.id_token
            if rows_deleted(session, _row(secret_hash)):
                self._audit(session, "session.end", "session", self._actor.name)
            return id_token

    def prune(self) -> int:
        """Deletes codes and sessions that have expired; returns how many there were."""
        expired = delete(BrowserSignIn).where(BrowserSignIn.expires_at <= self._clock())
        asked = (TokenRow.device_key.is_not(None), TokenRow.allowed_by.is_(None))
        with self._db.write() as session:
            session.execute(
                delete(TokenRow).where(*asked, TokenRow.asked_at <= self._clock() - CODE_LIFE)
            )
            return rows_deleted(session, expired)

    def _begin_session(
        self, session: Session, token_hash: str, now: datetime, *, by: str, **columns: str | None
    ) -> str:
        secret = _add(session, "session", token_hash, now, now + SESSION_IDLE_LIFE, **columns)
        self._audit(session, "session.begin", "session", self._actor.name, by=by)
        return secret


def hash_of_owner(owner: str) -> str:
    """Stands where the hash of a token would; no token has it, since no row of tokens does."""
    return hash_of_token(f"owner {owner}".encode())


def _add(
    session: Session,
    kind: _Kind,
    token_hash: str,
    now: datetime,
    expires_at: datetime,
    **columns: str | None,
) -> str:
    secret = secrets.token_urlsafe(32)  # 256 random bits
    surplus = (
        select(BrowserSignIn.secret_hash)
        .where(BrowserSignIn.token_hash == token_hash, BrowserSignIn.kind == kind)
        .order_by(BrowserSignIn.expires_at.desc())
        .offset(MAX_OF_TOKEN - 1)
    )
    if hashes := session.scalars(surplus).all():
        session.execute(delete(BrowserSignIn).where(BrowserSignIn.secret_hash.in_(hashes)))
    row = BrowserSignIn(
        secret_hash=hash_of_token(secret.encode()),
        kind=kind,
        token_hash=token_hash,
        created_at=now,
        expires_at=expires_at,
        **columns,
    )
    session.add(row)
    session.flush()
    return secret


def _valid(kind: _Kind, secret_hashes: Collection[str], now: datetime) -> Select[BrowserSignIn]:
    """Those of these codes or sessions that have not ended."""
    return select(BrowserSignIn).where(
        BrowserSignIn.secret_hash.in_(secret_hashes),
        BrowserSignIn.kind == kind,
        BrowserSignIn.expires_at > now,
    )


def _row(secret_hash: str) -> Delete:
    return delete(BrowserSignIn).where(BrowserSignIn.secret_hash == secret_hash)

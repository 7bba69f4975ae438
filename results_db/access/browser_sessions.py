"""Sign-ins of browsers: one-time codes, and the sessions that they are exchanged for.

Both are 256 random bits, of which the database keeps the SHA-256, as of tokens. A row stands for a
token: it has the hash of the token, not its name or role, so that a session is never worth more
than the token is at the moment. Tokens in files of the data directory are not in the database;
their hashes are, in these rows. The sessions of an owner whom a provider or a proxy signs in stand
for a token that nobody knows; each sign-in renews its role and its end.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Literal

from sqlalchemy import Delete, Select, delete, select, update
from sqlalchemy.orm import Session

from layout_tuner.results_db.access.tokens import CODE_LIFE, hash_of_token, note_owner
from layout_tuner.results_db.actor import Actor, TokenRole
from layout_tuner.results_db.database.database import rows_deleted
from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.errors import OwnerInvalidError, OwnerNotFoundError
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
        named: str,
        role: TokenRole,
        *,
        source: str,
        subject: str = "",
        id_token: str | None = None,
        groups_left_out: int = 0,
    ) -> tuple[str, str]:
        """Creates a session for whom a provider or a proxy names; returns owner and secret.

        A subject signs in as the owner to which it is bound. Without one it gets the owner of the
        name if that is new, and is bound to it. A proxy states no subject: its name counts.

        Raises OwnerInvalidError if the name is that of an owner who is not the subject's.
        """
        now, by = self._clock(), "oidc" if subject else "header"
        with self._db.write() as session:
            bound = select(OwnerRow.name).where(OwnerRow.subject == subject)
            owner = (session.scalar(bound) if subject else None) or named
            is_new = note_owner(session, owner, now, owner)
            row = session.get_one(OwnerRow, owner, with_for_update={"key_share": True})
            if subject and is_new:
                row.subject = subject
            elif subject and row.subject != subject:
                raise OwnerInvalidError(
                    f"the owner {owner!r} is not yours: an admin can give it to you with `layout-tuner "
                    f"owner set {owner} --subject {shlex.quote(subject)}`"
                )
            signed_in = (TokenRow.owner == owner, TokenRow.source == source)
            token = session.scalar(
                select(TokenRow).where(*signed_in, TokenRow.revoked_at.is_(None))
            )
            if token is None:
                name, unknown = f"sign-in.{secrets.token_hex(8)}", secrets.token_bytes(32)
                made = {"source": source, "created_at": now, "created_by": owner}
                hashed = hash_of_token(unknown)
                token = TokenRow(name=name, owner=owner, secret_hash=hashed, **made)
                session.add(token)
            token.role, token.expires_at = role, now + SESSION_LIFE
            session.flush()
            actor = record_of(
                Actor, token, name=owner, token_id=token.id, address=self._actor.address
            )
            own = self.bound_to(self._db, actor)
            secret = own._begin_session(session, token.secret_hash, now, by=by, id_token=id_token)
            details = {
                "source": subject or source,
                "role": role,
                "groups_left_out": groups_left_out,
            }
            own._audit(session, f"sign_in.{by}", "session", owner, **details)
            return owner, secret

    def note_refusal(self, source: str, reason: str) -> None:
        """Records in the audit log that a sign-in by a provider or a header was refused."""
        with self._db.write() as session:
            self._audit(session, "sign_in.refused", "session", source[:255], reason=reason[:1000])

    @retried
    def end_sessions_of(self, owner: str) -> int:
        """Ends an owner's sessions, those of tokens too, and codes; returns how many.

        It also ends the command lines that the owner's own sign-ins allowed.

        Raises OwnerNotFoundError if there is no owner of this name.
        """
        of_tokens = select(TokenRow.secret_hash).where(TokenRow.owner == owner)
        of_owner = delete(BrowserSignIn).where(BrowserSignIn.token_hash.in_(of_tokens))
        with self._db.write() as session:
            if session.get(OwnerRow, owner) is None:
                raise OwnerNotFoundError(
                    f"there is no owner {owner[:80]!r}; `layout-tuner owner list` has all of them"
                )
            number = rows_deleted(session, of_owner)
            end_sign_ins(session, owner, self._clock())
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
        query = select(BrowserSignIn.id_token).where(BrowserSignIn.secret_hash == secret_hash)
        with self._db.write() as session:
            id_token = session.scalar(query)
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
        self,
        session: Session,
        token_hash: str,
        now: datetime,
        *,
        by: str,
        id_token: str | None = None,
    ) -> str:
        secret = _add(session, "session", token_hash, now, now + SESSION_IDLE_LIFE, id_token)
        self._audit(session, "session.begin", "session", self._actor.name, by=by)
        return secret


def end_sign_ins(session: Session, owner: str, now: datetime) -> None:
    """Ends what stands for an owner's sign-ins by a provider or a proxy, also command lines."""
    own = (TokenRow.owner == owner, TokenRow.source.is_not(None), TokenRow.revoked_at.is_(None))
    session.execute(update(TokenRow).where(*own).values(revoked_at=now))


def _add(
    session: Session,
    kind: _Kind,
    token_hash: str,
    now: datetime,
    expires_at: datetime,
    id_token: str | None = None,
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
        id_token=id_token,
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

"""Tokens: handed out, looked up by their hash, revoked.

A token is 256 random bits, so that one round of SHA-256 hides it: there is no dictionary to try. It is
shown once, when it is made, and kept nowhere.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Final, cast

from sqlalchemy import or_, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from results_db.access_records import TokenRecord
from results_db.actor import TokenRole
from results_db.errors import TokenDuplicateError, TokenInvalidError, TokenNotFoundError
from results_db.part import StorePart
from results_db.service_tables import TokenRow
from results_db.session import breaks_unique

MAX_LIFE: Final = timedelta(days=3660)
"""Longest time that a token with an expiry may live."""

USE_NOTED_EVERY: Final = timedelta(minutes=1)
"""How exactly a token's last use is known."""

LOCAL_ADMIN: Final = "local"
LOCAL_WORKER: Final = "local-worker"
"""Names of the tokens in a data directory's files, which the database does not have."""

_RESERVED: Final = frozenset({"system", LOCAL_ADMIN, LOCAL_WORKER})
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


def new_token() -> str:
    """A token that nobody has: one word of ASCII, 256 random bits."""
    return f"lt_{secrets.token_urlsafe(32)}"


def hash_of_token(token: bytes) -> str:
    """What the database keeps of a token."""
    return hashlib.sha256(token).hexdigest()


class Tokens(StorePart):
    """The tokens' part of the store."""

    def create_token(
        self, name: str, role: TokenRole, *, expires_at: datetime | None = None
    ) -> tuple[TokenRecord, str]:
        """Hands a token out: its record, and the token itself, which nobody can read again.

        A token of the same name that has expired makes room for it.

        Args:
            name: whose it is; 1 to 64 of letters, digits, dot, dash, underscore, @.
            role: what it may do.
            expires_at: when it ends by itself; None: never.

        Raises:
            TokenInvalidError: the name is none or reserved, or the end is past or too far away.
            TokenDuplicateError: a token of this name is valid.
        """
        now = self._clock()
        _refuse_invalid(name, expires_at, now)
        token = new_token()
        row = TokenRow(
            name=name,
            role=role,
            secret_hash=hash_of_token(token.encode()),
            created_at=now,
            created_by=self._actor.name,
            expires_at=expires_at,
        )
        with self._db.write() as session:
            _revoke_expired(session, name, now)
            _add(session, row)
            until = expires_at.isoformat() if expires_at else None
            self._audit(session, "token.create", "token", name, role=role, expires_at=until)
            return _record(row), token

    def tokens(self, *, revoked: bool = False) -> list[TokenRecord]:
        """Tokens, the youngest first.

        Args:
            revoked: also those that were revoked.
        """
        query = select(TokenRow).order_by(TokenRow.id.desc())
        if not revoked:
            query = query.where(TokenRow.revoked_at.is_(None))
        with self._db.read() as session:
            return [_record(row) for row in session.scalars(query)]

    def token_by_hash(self, secret_hash: str) -> TokenRecord | None:
        """The token with this hash, revoked or expired as it may be; None where nobody was given it."""
        with self._db.read() as session:
            row = session.scalar(select(TokenRow).where(TokenRow.secret_hash == secret_hash))
            return None if row is None else _record(row)

    def revoke_token(self, token_id: int) -> TokenRecord:
        """Ends a token for good. Twice is once.

        Raises:
            TokenNotFoundError: there is none with this id.
        """
        now = self._clock()
        with self._db.write() as session:
            row = session.get(TokenRow, token_id, with_for_update={"key_share": True})
            if row is None:
                raise TokenNotFoundError(
                    f"there is no token {token_id}; `layout-tuner token list` has those that are valid"
                )
            if row.revoked_at is None:
                row.revoked_at = now
                self._audit(session, "token.revoke", "token", row.name, role=row.role)
            return _record(row)

    def note_tokens_used(self, token_ids: Collection[int]) -> None:
        """Keeps that these tokens were used just now, to the minute."""
        now = self._clock()
        long_ago = or_(
            TokenRow.last_used_at.is_(None), TokenRow.last_used_at < now - USE_NOTED_EVERY
        )
        with self._db.write() as session:
            # One order, so that two processes which note the same tokens do not wait for each other.
            for token_id in sorted(token_ids):
                session.execute(
                    update(TokenRow)
                    .where(TokenRow.id == token_id, long_ago)
                    .values(last_used_at=now)
                )


def _refuse_invalid(name: str, expires_at: datetime | None, now: datetime) -> None:
    if not _NAME.fullmatch(name):
        raise TokenInvalidError(
            f"name={name[:80]!r} is not 1 to 64 characters of A-Z a-z 0-9 . _ @ - that begin with a "
            "letter or digit"
        )
    if name in _RESERVED:
        raise TokenInvalidError(
            f"name={name!r} is one of {', '.join(sorted(_RESERVED))}, which the service gives itself; "
            "choose another"
        )
    if expires_at is not None and not now < expires_at <= now + MAX_LIFE:
        raise TokenInvalidError(
            f"expires_at={expires_at.isoformat()} is not within the next {MAX_LIFE.days} days; "
            "leave it out for a token that does not expire"
        )


def _revoke_expired(session: Session, name: str, now: datetime) -> None:
    session.execute(
        update(TokenRow)
        .where(TokenRow.name == name, TokenRow.revoked_at.is_(None), TokenRow.expires_at <= now)
        .values(revoked_at=now)
    )


def _add(session: Session, row: TokenRow) -> None:
    session.add(row)
    try:
        session.flush()
    except IntegrityError as error:
        if not _is_taken(error):
            raise
        raise TokenDuplicateError(
            f"a token named {row.name!r} is valid; revoke it first, or choose another name"
        ) from error


def _is_taken(error: IntegrityError) -> bool:
    diagnostics = getattr(error.orig, "diag", None)
    if diagnostics is not None:
        return bool(diagnostics.constraint_name == "uq_tokens_name_live")
    return breaks_unique(error, "tokens", "name")


def _record(row: TokenRow) -> TokenRecord:
    return TokenRecord(
        id=row.id,
        name=row.name,
        role=cast("TokenRole", row.role),
        created_at=row.created_at,
        created_by=row.created_by,
        expires_at=row.expires_at,
        revoked_at=row.revoked_at,
        last_used_at=row.last_used_at,
    )

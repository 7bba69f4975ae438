"""Tokens; the owners of campaigns and trials; the list of the audit log.

A token is 256 random bits, so that one round of SHA-256 hides it: no dictionary contains it. It is
shown once, when it is created; the database keeps only its hash. Entries of the audit
log are written in the transaction of the change (`database.audit_log`).

A command line that signed in by a device code (RFC 8628) has a short token, and a secret that
replaces it: a key, which stays, and a part that each use replaces. A part that was used before ends
the sign-in (RFC 9700, 4.14.2), but the last one is accepted once more: its answer was lost.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Final, Unpack

from sqlalchemy import Select, delete, or_, select, update
from sqlalchemy.orm import Session

from layout_tuner.results_db.actor import Actor, TokenRole
from layout_tuner.results_db.database.audit_log import entries
from layout_tuner.results_db.database.database import refused_unless_unique
from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.errors import (
    DeviceSignInRefusedError,
    TokenDuplicateError,
    TokenInvalidError,
    TokenNotFoundError,
)
from layout_tuner.results_db.models.service_tables import (
    BrowserSignIn,
    GroupRow,
    OwnerRow,
    TokenRow,
)
from layout_tuner.results_db.models.table_base import insert_missing
from layout_tuner.results_db.models.tables import Campaign, Trial
from layout_tuner.results_db.rows import own_first, record_of
from layout_tuner.results_db.service_records import AuditChoice, AuditEntryRead


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRecord:
    """A token as the database keeps it: without the secret, of which only a hash is kept."""

    id: int
    name: str
    """Its name in the audit log."""
    owner: str
    """The owner whom it acts for: campaigns belong to owners."""
    role: TokenRole
    created_at: datetime
    created_by: str
    expires_at: datetime | None
    """None: it does not expire."""
    revoked_at: datetime | None
    """None: it is not revoked."""
    last_used_at: datetime | None
    """Accurate to a minute; None: never."""
    allowed_by: str | None = None
    """Of a short token, the hash of the token that has to be valid too."""
    ends_at: datetime | None = None
    """Of a short token, the end of its sign-in."""
    source: str | None = None
    """The issuer, or the header, whose sign-ins stand for it; None: somebody has the token."""

    def is_valid(self, now: datetime) -> bool:
        """Whether it is neither revoked nor expired at `now`."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


MAX_LIFE: Final = timedelta(days=3660)
"""Longest time that a token with an expiry may live."""

USE_NOTED_EVERY: Final = timedelta(minutes=1)
"""Precision of a token's last use."""

CODE_LIFE: Final = timedelta(minutes=10)
"""Lifetime of a code for a browser, and of a device code."""

AGAIN_WITHIN: Final = timedelta(minutes=10)
"""How long the part of a secret before the last is accepted once more."""

CODE_LETTERS: Final = "BCDFGHJKLMNPQRSTVWXZ"
"""Of the code that a person compares: no vowels, so no words (RFC 8628, 6.1)."""

LOCAL_ADMIN: Final = "local"

LOCAL_WORKER: Final = "local-worker"
"""Names of the tokens in the files of a data directory, which are not in the database."""

_RESERVED: Final = frozenset({"system", LOCAL_ADMIN, LOCAL_WORKER})

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")


def hash_of_token(token: bytes) -> str:
    """The hash of a token, which the database keeps."""
    return hashlib.sha256(token).hexdigest()


class Access(StoreSection):
    """The store's methods for tokens, owners and the audit log."""

    def create_token(
        self,
        name: str,
        role: TokenRole,
        *,
        owner: str | None = None,
        expires_at: datetime | None = None,
    ) -> tuple[TokenRecord, str]:
        """Creates a token; returns its record and the secret, which cannot be read again.

        It acts for an owner, who is noted if new; without one for an owner of the token's name.

        An expired token of the same name is revoked. The name has 1 to 64 letters, digits, dots,
        dashes, underscores and @.

        Raises:
            TokenInvalidError: the name is invalid or reserved, or the expiry is past or too far
                away.
            TokenDuplicateError: a token of this name is valid.
        """
        now = self._clock()
        _refuse_invalid(name, expires_at, now)
        owner = name if owner is None else owner
        refuse_bad_name(owner, "owner")
        token = f"lt_{secrets.token_urlsafe(32)}"  # 256 random bits as one word of ASCII
        row = TokenRow(
            name=name,
            owner=owner,
            role=role,
            secret_hash=hash_of_token(token.encode()),
            created_at=now,
            created_by=self._actor.name,
            expires_at=expires_at,
        )
        with self._db.write() as session:
            live = (TokenRow.name == name, TokenRow.revoked_at.is_(None))
            expired = update(TokenRow).where(*live, TokenRow.expires_at <= now)
            session.execute(expired.values(revoked_at=now))
            note_owner(session, owner, now, self._actor.name)
            session.add(row)
            taken = f"a token named {name!r} is valid; revoke it first, or choose another name"
            with refused_unless_unique(TokenDuplicateError(taken), "tokens", "name", only="live"):
                session.flush()
            until = expires_at.isoformat() if expires_at else None
            self._audit(
                session, "token.create", "token", name, role=role, owner=owner, expires_at=until
            )
            return record_of(TokenRecord, row), token

    def tokens(self, *, revoked: bool = False) -> list[TokenRecord]:
        """Tokens, the newest first: those that are neither revoked nor of sign-ins, or all."""
        query = select(TokenRow).where(TokenRow.user_code.is_(None)).order_by(TokenRow.id.desc())
        if not revoked:
            of_none = (TokenRow.revoked_at, TokenRow.device_key, TokenRow.source)
            query = query.where(*(column.is_(None) for column in of_none))
        with self._db.read() as session:
            return [record_of(TokenRecord, row) for row in session.scalars(query)]

    def token_by_hash(self, secret_hash: str) -> TokenRecord | None:
        """The token with this hash, even if revoked or expired; None: there is none."""
        return self.tokens_by_hash((secret_hash,)).get(secret_hash)

    def tokens_by_hash(self, secret_hashes: Collection[str]) -> dict[str, TokenRecord]:
        """Those of these tokens that exist, even if revoked or expired."""
        query = select(TokenRow).where(TokenRow.secret_hash.in_(secret_hashes))
        with self._db.read() as session:
            return {row.secret_hash: record_of(TokenRecord, row) for row in session.scalars(query)}

    def revoke_token(self, token_id: int) -> TokenRecord:
        """Revokes a token for good, and ends its sessions; TokenNotFoundError without one."""
        now = self._clock()
        with self._db.write() as session:
            row = session.get(TokenRow, token_id, with_for_update={"key_share": True})
            if row is None:
                raise TokenNotFoundError(
                    f"there is no token {token_id}; `layout-tuner token list` has those that are valid"
                )
            if row.revoked_at is None:
                row.revoked_at = now
                session.execute(
                    delete(BrowserSignIn).where(BrowserSignIn.token_hash == row.secret_hash)
                )
                self._audit(session, "token.revoke", "token", row.name, role=row.role)
            return record_of(TokenRecord, row)

    def note_tokens_used(self, token_ids: Collection[int]) -> None:
        """Records that these tokens were used now, to the minute."""
        now = self._clock()
        long_ago = or_(
            TokenRow.last_used_at.is_(None), TokenRow.last_used_at < now - USE_NOTED_EVERY
        )
        with self._db.write() as session:
            # In one order, so that two processes cannot deadlock.
            for token_id in sorted(token_ids):
                session.execute(
                    update(TokenRow)
                    .where(TokenRow.id == token_id, long_ago)
                    .values(last_used_at=now)
                )

    def ask_for_device(self, host: str) -> tuple[str, str]:
        """Begins a command line's sign-in; returns its secret, and the code for a person."""
        now, key, part = self._clock(), secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        code = "".join(secrets.choice(CODE_LETTERS) for _ in range(8))
        name, asked_from = f"device.{secrets.token_hex(4)}", f"{host}, {self._actor.address}"
        named = {"name": name, "created_by": "", "role": "viewer", "asked_from": asked_from}
        hashes = {"device_key": _hash(key), "device_part": _hash(part), "user_code": _hash(code)}
        hashes["part_before"] = ""
        times = dict.fromkeys(("created_at", "asked_at", "expires_at"), now)  # no valid token yet
        with self._db.write() as session:
            session.add(
                TokenRow(secret_hash=_hash(secrets.token_hex()), **named, **hashes, **times)
            )
        return f"{key}.{part}", f"{code[:4]}-{code[4:]}"

    def device_asked(self, code: str) -> str | None:
        """Host and address of the command line that waits with a code; None: there is none."""
        return self._scalar(_waiting(code, self._clock()).with_only_columns(TokenRow.asked_from))

    @retried
    def decide_device(self, code: str, allowed_by: str | None, ends_at: datetime) -> bool:
        """Allows a command line to act as the actor while a token is valid, or denies it (None).

        Returns whether one waits with the code.
        """
        now, actor = self._clock(), self._actor
        with self._db.write() as session:
            row = session.scalar(_waiting(code, now).with_for_update())
            if row is None:
                return False
            row.name = f"{actor.name[:55]}.{row.name.rpartition('.')[2]}"
            row.owner, row.role, row.created_by = actor.owner, actor.role, actor.name
            row.user_code, row.allowed_by, row.ends_at = None, allowed_by, ends_at
            row.revoked_at = None if allowed_by else now
            action = "device.allow" if allowed_by else "device.deny"
            self._audit(session, action, "token", row.name, asked_from=row.asked_from)
            return True

    @retried
    def exchange_device_secret(self, secret: str, life: timedelta) -> tuple[str, str]:
        """Exchanges a command line's secret for a token that lives so long, and another secret.

        Raises DeviceSignInRefusedError: nobody has allowed it, or it has ended.
        """
        now, (key, _, given) = self._clock(), secret.partition(".")
        query, part = select(TokenRow).where(TokenRow.device_key == _hash(key)), _hash(given)
        if self._scalar(query) is None:  # a guess does not wait for the lock of writers
            raise DeviceSignInRefusedError("invalid_grant")
        token, new_part = f"lt_{secrets.token_urlsafe(32)}", secrets.token_urlsafe(32)
        with self._db.write() as session:
            row = session.scalars(query.with_for_update()).one()
            own = record_of(Actor, row, token_id=row.id, address=self._actor.address)
            note = partial(self.bound_to(self._db, own)._audit, session, asked_from=row.asked_from)
            is_first, is_again = row.part_before == "", part == row.part_before
            refusal = _why_no_token(row, part, now)
            if refusal == "replay":
                row.revoked_at = now
                note("token.replay", "token", row.name)
            elif not refusal:
                if is_first or is_again:  # all renewals would fill the audit
                    note("sign_in.device" if is_first else "token.renew", "token", row.name)
                # A device code is used once: a person is there, who can sign in again.
                row.part_before = None if is_first or is_again else row.device_part
                row.secret_hash, row.device_part, row.asked_at = _hash(token), _hash(new_part), now
                row.expires_at = min(now + life, row.ends_at or now)
        if refusal:  # not within the transaction, which is to be kept
            raise DeviceSignInRefusedError("invalid_grant" if refusal == "replay" else refusal)
        return token, f"{key}.{new_part}"

    def owner_of_campaign(self, reference: int | str) -> str | None:
        """The owner of a campaign with an id or a name; None: no such campaign."""
        column = Campaign.id if isinstance(reference, int) else Campaign.name
        query = select(Campaign.created_by).where(column == reference)
        return self._scalar(query.order_by(*own_first(self._actor.owner)).limit(1))

    def owner_of_trial(self, trial_id: int) -> str | None:
        """The owner of a trial's campaign; None: no such trial."""
        return self._scalar(select(Campaign.created_by).join(Trial).where(Trial.id == trial_id))

    def audit(
        self, *, before_id: int | None = None, limit: int = 100, **chosen: Unpack[AuditChoice]
    ) -> list[AuditEntryRead]:
        """Entries of the audit log, the newest first; see `audit_log.entries`."""
        with self._db.read() as session:
            rows = entries(session, before_id=before_id, limit=limit, **chosen)
            return [record_of(AuditEntryRead, row) for row in rows]


def note_owner(
    session: Session,
    name: str,
    now: datetime,
    by: str,
    table: type[OwnerRow | GroupRow] = OwnerRow,
) -> bool:
    """Adds an owner, or a group, unless there is one of this name; returns whether it did."""
    row = {"name": name, "weight": 1.0, "created_at": now, "created_by": by}
    return session.get(table, name) is None and insert_missing(session, table, [row]) > 0


def _hash(secret: str) -> str:
    return hash_of_token(secret.encode())


def _why_no_token(row: TokenRow, part: str, now: datetime) -> str:
    """Why a command line gets no token for a part of its secret; empty: it gets one."""
    assert row.asked_at is not None
    is_again = part == row.part_before and now < row.asked_at + AGAIN_WITHIN
    ends_at = row.created_at + CODE_LIFE if row.part_before == "" else row.ends_at or now
    if row.revoked_at:
        return "invalid_grant" if row.allowed_by else "access_denied"
    if part != row.device_part and not is_again:
        return "replay"
    if now >= ends_at:
        return "expired_token"
    return "authorization_pending" if row.user_code else ""


def _waiting(code: str, now: datetime) -> Select[TokenRow]:
    """The command line that waits with a code, however a person writes it."""
    letters = "".join(each for each in code.upper() if each in CODE_LETTERS)
    is_live = TokenRow.created_at > now - CODE_LIFE
    return select(TokenRow).where(TokenRow.user_code == _hash(letters), is_live)


def is_name(word: str) -> bool:
    """Whether it may be the name of a token, an owner or a group."""
    return _NAME.fullmatch(word) is not None


def refuse_bad_name(name: str, field: str = "name") -> None:
    """Raises TokenInvalidError for what is no name of a token, an owner or a group."""
    if not is_name(name):
        raise TokenInvalidError(
            f"{field}={name[:80]!r} is not 1 to 64 characters of A-Z a-z 0-9 . _ @ - that begin with a "
            "letter or digit"
        )


def refuse_taken_name(name: str, field: str = "name") -> None:
    """The same, and for the names that the service gives itself."""
    refuse_bad_name(name, field)
    if name in _RESERVED:
        raise TokenInvalidError(
            f"{field}={name!r} is one of {', '.join(sorted(_RESERVED))}, which the service gives itself; "
            "choose another"
        )


def _refuse_invalid(name: str, expires_at: datetime | None, now: datetime) -> None:
    refuse_taken_name(name)
    if expires_at is not None and not now < expires_at <= now + MAX_LIFE:
        raise TokenInvalidError(
            f"expires_at={expires_at.isoformat()} is not within the next {MAX_LIFE.days} days; "
            "leave it out for a token that does not expire"
        )

"""The documents of tokens and of the audit."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field

from layout_tuner.api.schemas.campaigns_and_trials import Document, Request
from layout_tuner.api.schemas.text_types import Moment
from layout_tuner.results_db.actor import TokenRole
from layout_tuner.results_db.service_records import AuditEntryRead

TokenId = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]


class TokenCreate(Request):
    """A new token."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """The owner of what it submits; also in the audit. Each name has at most one valid token."""
    role: TokenRole
    """viewer: reads. submitter: also submits campaigns and changes its own. admin: everything.
    worker: leases and reports trials, and nothing else."""
    # A strict model refuses texts as times, but JSON has no other form.
    expires_at: Annotated[Moment | None, Field(strict=False)] = None
    """When it expires, with a time zone; null: never."""


class TokenRead(Document):
    """A token without its secret, which cannot be read again."""

    id: int
    name: str
    role: TokenRole
    created_at: datetime
    created_by: str
    """The name of the token that made it."""
    expires_at: datetime | None
    """null: it does not expire."""
    revoked_at: datetime | None
    """null: it is not revoked."""
    last_used_at: datetime | None
    """Accurate to a minute; null: never."""
    is_valid: bool


class TokenCreated(TokenRead):
    """A new token, with its secret."""

    token: str
    """The secret; the service does not store it."""


class TokenPage(Document):
    """Tokens, the newest first, without those of the data directory."""

    tokens: list[TokenRead]


class SignInCodeCreated(Document):
    """A one-time code with which the holder of a token signs in to the pages."""

    code: str
    """Open `/sign-in#code=<code>` of the service in a browser. It works once."""
    expires_at: datetime


class SignedOut(Document):
    """What ended."""

    sessions: int
    """Sessions and one-time codes that ended."""


class WhoAmI(Document):
    """The holder of the request's token."""

    name: str
    role: TokenRole
    expires_at: datetime | None
    """null: it does not expire."""


class AuditPage(Document):
    """Changes, the newest first."""

    entries: list[AuditEntryRead]
    next_cursor: str | None
    """Pass it as `cursor` for the next page; null on the last."""

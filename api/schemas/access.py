"""The documents of access: tokens, whose token it is, the audit."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import Field

from api.schemas import Document, Request
from api.texts import Moment
from results_db.actor import TokenRole

TokenId = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]


class TokenCreate(Request):
    """A token to make."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    """Whose it is: what it submits belongs to this name, and the audit says it. A name has one valid token."""
    role: TokenRole
    """viewer: reads. submitter: also submits campaigns and changes its own. admin: everything. worker: leases
    trials and reports them, and nothing else."""
    # Strictness takes no text for a time, and JSON has nothing else for it.
    expires_at: Annotated[Moment | None, Field(strict=False)] = None
    """When it ends by itself, with a time zone; null: never."""


class TokenRead(Document):
    """A token, but for the token itself, which nobody can read again."""

    id: int
    name: str
    role: TokenRole
    created_at: datetime
    created_by: str
    """The name of the token that made it."""
    expires_at: datetime | None
    """null: it does not expire."""
    revoked_at: datetime | None
    """null: nobody revoked it."""
    last_used_at: datetime | None
    """To the minute or so; null: never."""
    is_valid: bool


class TokenCreated(TokenRead):
    """A token that was made."""

    token: str
    """The token itself, this once."""


class TokenPage(Document):
    """Tokens, the youngest first; those in the data directory's files are not among them."""

    tokens: list[TokenRead]


class WhoAmI(Document):
    """Whose token the request carries."""

    name: str
    role: TokenRole
    expires_at: datetime | None
    """null: it does not expire."""


class AuditEntryRead(Document):
    """One change."""

    id: int
    at: datetime
    actor: str
    """The name of the token that made it; "system": the service by itself."""
    role: str
    token_id: int | None
    """null: a token in the data directory's files, or none."""
    address: str
    """Where the request came from; empty: no request made it."""
    action: str
    """As "campaign.pause"."""
    target_kind: str
    target: str
    details: dict[str, Any]


class AuditPage(Document):
    """Changes, the youngest first."""

    entries: list[AuditEntryRead]
    next_cursor: str | None
    """For the next page; null: there is none."""

"""Tokens as the database knows them, and the audit of what was done with them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from results_db.actor import TokenRole


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenRecord:
    """A token: everything but the token itself, of which a hash alone is kept."""

    id: int
    name: str
    """In whose name it acts; campaigns belong to a name."""
    role: TokenRole
    created_at: datetime
    created_by: str
    """The name of the token that made it."""
    expires_at: datetime | None
    """None: it does not expire."""
    revoked_at: datetime | None
    """None: nobody has revoked it."""
    last_used_at: datetime | None
    """To within a minute; None: never."""

    def is_valid(self, now: datetime) -> bool:
        """Whether it opens anything at `now`."""
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditRecord:
    """One change: who made it, when, and what it was."""

    id: int
    at: datetime
    actor: str
    """The name of the token, or "system" for what the service does by itself."""
    role: str
    token_id: int | None
    """None: a token of the data directory, or the service itself."""
    address: str
    """Where the request came from; empty: from no request."""
    action: str
    """As "campaign.pause"."""
    target_kind: str
    target: str
    details: dict[str, Any]

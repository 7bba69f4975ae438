"""Who changes something: the name behind a token, and its role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

TokenRole = Literal["viewer", "submitter", "admin", "worker"]
Role = Literal["viewer", "submitter", "admin", "worker", "system"]

TOKEN_ROLES: Final[tuple[TokenRole, ...]] = ("viewer", "submitter", "admin", "worker")
"""What a token may be; the service itself acts as "system"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    """Who changes something."""

    name: str
    """The name of the token; "system" for the service's own processes."""
    role: Role
    token_id: int | None = None
    """None: no token of the database."""
    address: str = ""
    """Where the request came from; empty: it was no request."""


SYSTEM: Final = Actor(name="system", role="system")
"""The service itself, and whoever works on its database directly."""

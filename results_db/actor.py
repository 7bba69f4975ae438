"""The actor of a change: the name and role of the token that a request was made with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

TokenRole = Literal["viewer", "submitter", "admin", "worker"]
Role = Literal[TokenRole, "system"]
"""The service itself acts as "system"."""

TOKEN_ROLES: Final[tuple[TokenRole, ...]] = get_args(TokenRole)


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    """The name and role in which changes are made."""

    name: str
    """The name of the token; "system" for the service's own processes."""
    role: Role
    token_id: int | None = None
    """None: the token is not in the database, or there is none."""
    address: str = ""
    """Where the request came from; empty without a request."""


SYSTEM: Final = Actor(name="system", role="system")
"""The service itself, and commands that open its database directly."""

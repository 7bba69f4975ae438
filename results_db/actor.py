"""The actor of a change: the token of a request and its owner; words of groups and quotas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

TokenRole = Literal["viewer", "submitter", "admin", "worker"]
Role = Literal[TokenRole, "system"]
"""The service itself acts as "system"."""

TOKEN_ROLES: Final[tuple[TokenRole, ...]] = get_args(TokenRole)


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    """The name and role in which changes are made, and the owner of what they make."""

    name: str
    """The name of the token; "system" for the service's own processes."""
    role: Role
    owner: str = ""
    """The owner whom the token acts for; not given: the owner has the token's name."""
    token_id: int | None = None
    """None: the token is not in the database, or there is none."""
    address: str = ""
    """Where the request came from; empty without a request."""

    def __post_init__(self) -> None:
        if not self.owner:
            object.__setattr__(self, "owner", self.name)

    @property
    def sees_all(self) -> bool:
        """Whether no campaign is hidden: workers run the probes of everybody."""
        return self.role in ("admin", "worker", "system")


SYSTEM: Final = Actor(name="system", role="system")
"""The service itself, and commands that open its database directly."""

MemberSource = Literal["admin", "claim"]
"""Who put an owner into a group: an administrator, or a claim of the sign-in."""
MEMBER_SOURCES: Final[tuple[MemberSource, ...]] = get_args(MemberSource)

QuotaKind = Literal["owner", "group"]
QUOTA_KINDS: Final[tuple[QuotaKind, ...]] = get_args(QuotaKind)

QuotaPeriod = Literal["day", "week", "month", "year"]
"""Of the calendar in UTC; weeks begin on Monday."""
QUOTA_PERIODS: Final[tuple[QuotaPeriod, ...]] = get_args(QuotaPeriod)

QuotaAction = Literal["refuse", "wait"]
"""What becomes of a campaign beyond a quota: its submission is refused, or its trials wait."""
QUOTA_ACTIONS: Final[tuple[QuotaAction, ...]] = get_args(QuotaAction)

MAX_SUBJECT: Final = 511
"""Most characters of whom a provider signs in: an issuer, a # and a `sub`."""

"""The documents of tokens, owners, groups and the audit; of shares, quotas and webhooks."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from pydantic import Field

from layout_tuner.api.schemas.campaigns_and_trials import Document, Request
from layout_tuner.api.schemas.text_types import Moment
from layout_tuner.results_db.actor import MAX_SUBJECT, QuotaAction, TokenRole
from layout_tuner.results_db.service_records import (
    AuditEntryRead,
    GroupRead,
    Notice,
    OwnerRead,
    QuotaRead,
    ShareRead,
    WebhookFormat,
    WebhookRead,
)

TokenId = Annotated[int, Field(ge=1, le=(1 << 31) - 1)]
Name = Annotated[str, Field(min_length=1, max_length=64)]


class TokenCreate(Request):
    """A new token."""

    name: Name
    """Its name in the audit. Each name has at most one valid token."""
    owner: Name | None = None
    """The owner whom it acts for, to whom its campaigns belong, and who is added if new; null: an
    owner of the token's name."""
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
    owner: str
    """The owner whom it acts for."""
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
    owner: str
    """The owner whom the token acts for."""
    groups: tuple[str, ...]
    """Those of the owner, by name."""
    expires_at: datetime | None
    """null: it does not expire. A token that is renewed until then counts as one."""


class DeviceCodeCreated(Document):
    """A command line that waits for a person, who opens `/device?code=<code>` in any browser."""

    secret: str
    code: str
    interval_s: float
    """Least seconds between two questions for a token."""


class DeviceToken(WhoAmI):
    """A short token, and the secret that replaces it once."""

    token: str
    secret: str
    lives_s: float


class OwnerPut(Request):
    """What an owner gets."""

    weight: float | None = None
    """In fair shares, from 0.001 to 1000; null: it stays, and is 1 for a new owner."""
    subject: Annotated[str | None, Field(max_length=MAX_SUBJECT)] = None
    """Whom a provider signs in as this owner: issuer, # and `sub`; empty: none; null: it stays."""


class OwnerPage(Document):
    """Owners, by name."""

    owners: list[OwnerRead]


class GroupPut(Request):
    """What a group has."""

    weight: float | None = None
    """In fair shares, from 0.001 to 1000; null: it stays, and is 1 for a new group."""
    members: list[Name] | None = None
    """Its owners instead of those it had; null: they stay."""
    join: list[Name] = Field(default_factory=list)
    """Owners who become members too."""
    leave: list[Name] = Field(default_factory=list)
    """Members who leave it."""


class GroupPage(Document):
    """Groups, by name."""

    groups: list[GroupRead]


class AuditPage(Document):
    """Changes, the newest first."""

    entries: list[AuditEntryRead]
    next_cursor: str | None
    """Pass it as `cursor` for the next page; null on the last."""


class SharePage(Document):
    """Shares of clusters, by cluster and owner."""

    shares: list[ShareRead]


class QuotaPut(Request):
    """The quota of an owner or a group in a period."""

    node_hours: float
    """Above 0, and at most 1e8."""
    beyond: QuotaAction = "refuse"
    # A strict model refuses texts as times, but JSON has no other form.
    until: Annotated[Moment | None, Field(strict=False)] = None
    """When it ends for good; null: when it is removed."""


class QuotaPage(Document):
    """Quotas, the oldest first."""

    quotas: list[QuotaRead]


class WebhookCreate(Request):
    """A new webhook."""

    address: Annotated[str, Field(max_length=2000)]
    """Where messages go: https, and of a host that an administrator allows."""
    format: WebhookFormat = "standard"
    """standard, as Standard Webhooks has it; slack or mattermost."""
    events: Annotated[list[Notice], Field(min_length=1)]


class WebhookPage(Document):
    """The webhooks of an owner; for administrators those of all."""

    webhooks: list[WebhookRead]

"""Calls about access: tokens, whose token it is, who changed what."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from api.access_schemas import (
    AuditEntryRead,
    AuditPage,
    TokenCreate,
    TokenCreated,
    TokenPage,
    TokenRead,
    WhoAmI,
)
from api.client.call import PAGE, Call, Listing, get, post, reader_of
from api.client.route import route, walk


class AccessCalls:
    """What can be asked about tokens and the audit."""

    @route
    def whoami(self) -> Call[WhoAmI]:
        """Whose token this client carries, and what it may do."""
        return get("/whoami", WhoAmI)

    @route
    def create_token(self, token: TokenCreate) -> Call[TokenCreated]:
        """Makes a token; the answer has it this once."""
        return post("/tokens", TokenCreated, token.model_dump(mode="json"))

    @route
    def tokens(self, *, revoked: bool | None = None) -> Call[TokenPage]:
        """Tokens, the youngest first: those that are not revoked, or all."""
        return get("/tokens", TokenPage, revoked=revoked)

    @route
    def revoke_token(self, token_id: int) -> Call[TokenRead]:
        """Ends a token for good; twice is once."""
        return Call(
            method="DELETE",
            path=f"/v1/tokens/{token_id}",
            read=reader_of(TokenRead),
            is_repeatable=True,
        )

    @route
    def audit_page(
        self,
        *,
        actor: str | None = None,
        action: str | None = None,
        target_kind: str | None = None,
        target: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Call[AuditPage]:
        """A page of the changes, the youngest first: all, or those that are so."""
        query = _audit_query(actor, action, target_kind, target, since, until)
        return get("/audit", AuditPage, **query, limit=limit, cursor=cursor)

    @walk
    def audit(
        self,
        *,
        actor: str | None = None,
        action: str | None = None,
        target_kind: str | None = None,
        target: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> Listing[AuditPage, AuditEntryRead]:
        """Every change, the youngest first: all, or those that are so."""
        query = _audit_query(actor, action, target_kind, target, since, until)
        return Listing(
            page=lambda cursor: get("/audit", AuditPage, **query, limit=PAGE, cursor=cursor),
            items=lambda page: page.entries,
        )


def _audit_query(
    actor: str | None,
    action: str | None,
    target_kind: str | None,
    target: str | None,
    since: datetime | None,
    until: datetime | None,
) -> dict[str, Any]:
    return {
        "actor": actor,
        "action": action,
        "target_kind": target_kind,
        "target": target,
        "since": None if since is None else since.isoformat(),
        "until": None if until is None else until.isoformat(),
    }

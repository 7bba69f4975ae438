"""Access: tokens made, listed, revoked; whose token it is; who changed what."""

from __future__ import annotations

from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from pydantic import StringConstraints
from starlette.concurrency import run_in_threadpool

from api.access_schemas import (
    AuditEntryRead,
    AuditPage,
    TokenCreate,
    TokenCreated,
    TokenId,
    TokenPage,
    TokenRead,
    WhoAmI,
)
from api.dependencies import BookDep, HolderDep, StoreDep, read_cursor, write_cursor
from api.texts import Moment
from results_db.access_records import TokenRecord
from results_db.store import Store

router = APIRouter(prefix="/v1", tags=["access"])

# Control characters are in no name, and one database takes no NUL.
Word = Annotated[str, StringConstraints(max_length=255, pattern=r"^[^\x00-\x1f\x7f]+$")]


@router.get("/whoami")
async def read_whoami(holder: HolderDep) -> WhoAmI:
    """Read whose token the request carries, and what it may do."""
    return WhoAmI(name=holder.name, role=holder.role, expires_at=holder.expires_at)


@router.post("/tokens", status_code=HTTPStatus.CREATED)
def create_token(body: TokenCreate, store: StoreDep) -> TokenCreated:
    """Make a token. The answer has it this once; only a hash is kept.

    409 when the name has a valid token already.
    """
    record, token = store.create_token(body.name, body.role, expires_at=body.expires_at)
    return TokenCreated(**_fields(store, record), token=token)


@router.get("/tokens")
def list_tokens(
    store: StoreDep,
    revoked: Annotated[bool, Query(description="Also those that were revoked.")] = False,
) -> TokenPage:
    """List tokens, the youngest first; those in the data directory's files are not among them."""
    return TokenPage(
        tokens=[TokenRead(**_fields(store, record)) for record in store.tokens(revoked=revoked)]
    )


@router.delete("/tokens/{token_id}")
async def revoke_token(
    token_id: Annotated[TokenId, Path()], store: StoreDep, book: BookDep
) -> TokenRead:
    """End a token for good: at once in this process, within two seconds in others. Twice is once."""
    record = await run_in_threadpool(store.revoke_token, token_id)
    book.forget(token_id)
    return TokenRead(**_fields(store, record))


@router.get("/audit")
def list_audit(
    store: StoreDep,
    actor: Annotated[Word | None, Query(description="Only changes in this name.")] = None,
    action: Annotated[Word | None, Query(description='As "campaign.pause".')] = None,
    target_kind: Annotated[Word | None, Query(description='As "campaign".')] = None,
    target: Annotated[Word | None, Query(description="Only of what is called so.")] = None,
    since: Annotated[Moment | None, Query(description="At this time or later.")] = None,
    until: Annotated[Moment | None, Query(description="Before this time.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=80)] = None,
) -> AuditPage:
    """List who changed what and when, the youngest change first."""
    # One more than asked for tells whether there is a next page.
    found = store.audit(
        actor=actor,
        action=action,
        target_kind=target_kind,
        target=target,
        since=since,
        until=until,
        before_id=read_cursor(cursor),
        limit=limit + 1,
    )
    page = found[:limit]
    return AuditPage(
        entries=[AuditEntryRead(**asdict(entry)) for entry in page],
        next_cursor=write_cursor(page[-1].id) if len(found) > limit else None,
    )


def _fields(store: Store, record: TokenRecord) -> dict[str, Any]:
    return {**asdict(record), "is_valid": record.is_valid(store.now())}

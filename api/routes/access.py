"""Tokens and the audit."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Query
from pydantic import StringConstraints
from starlette.concurrency import run_in_threadpool

from layout_tuner.api.dependencies import CredentialDep, HolderDep, HubDep, StoreDep
from layout_tuner.api.errors import SignInCodeSourceError
from layout_tuner.api.http.cursors import read_cursor, write_cursor
from layout_tuner.api.http.request_bodies import BodyRoute
from layout_tuner.api.schemas.access import (
    AuditPage,
    SignedOut,
    SignInCodeCreated,
    TokenCreate,
    TokenCreated,
    TokenId,
    TokenPage,
    TokenRead,
    WhoAmI,
)
from layout_tuner.api.schemas.text_types import Moment
from layout_tuner.results_db.access.tokens import TokenRecord
from layout_tuner.results_db.store import Store

router = APIRouter(route_class=BodyRoute, prefix="/v1", tags=["access"])

# No name contains control characters, and PostgreSQL cannot store NUL.
Word = Annotated[str, StringConstraints(max_length=255, pattern=r"^[^\x00-\x1f\x7f]+$")]


@router.get("/whoami")
async def read_whoami(holder: HolderDep) -> WhoAmI:
    """Read the name and the role of the request's token."""
    return WhoAmI.of(holder)


@router.post("/sign-in-codes", status_code=HTTPStatus.CREATED)
def create_sign_in_code(credential: CredentialDep, store: StoreDep) -> SignInCodeCreated:
    """Create a one-time code for a browser, which becomes a session of the request's token.

    403 for a session, which could make itself longer with a code.
    """
    if credential.session_secret is not None:
        raise SignInCodeSourceError(
            "a session cannot make sign-in codes: use a token, as `layout-tuner login` does"
        )
    code, expires_at = store.sign_ins.create_code(credential.token_hash)
    return SignInCodeCreated(code=code, expires_at=expires_at)


@router.post("/tokens", status_code=HTTPStatus.CREATED)
def create_token(body: TokenCreate, store: StoreDep) -> TokenCreated:
    """Create a token. Only this response contains it; the service stores a hash.

    409 if the name already has a valid token.
    """
    record, token = store.access.create_token(body.name, body.role, expires_at=body.expires_at)
    return TokenCreated.of(record, is_valid=record.is_valid(store.now()), token=token)


@router.get("/tokens")
def list_tokens(
    store: StoreDep, revoked: Annotated[bool, Query(description="Also revoked tokens.")] = False
) -> TokenPage:
    """List tokens, the newest first, without those of the data directory."""
    return TokenPage(
        tokens=[_token(store, record) for record in store.access.tokens(revoked=revoked)]
    )


@router.delete("/tokens/{token_id}")
async def revoke_token(
    token_id: Annotated[TokenId, Path()], store: StoreDep, hub: HubDep
) -> TokenRead:
    """Revoke a token: at once in this process, within two seconds in others.

    Repeating it is harmless.
    """
    record = await run_in_threadpool(store.access.revoke_token, token_id)
    hub.streams.check_soon()
    return _token(store, record)


@router.post("/owners/{owner}/sign-out")
async def sign_out_owner(owner: Annotated[Word, Path()], store: StoreDep, hub: HubDep) -> SignedOut:
    """End all sessions of an owner in browsers, those of the owner's tokens too. Tokens stay."""
    number = await run_in_threadpool(store.sign_ins.end_sessions_of, owner)
    hub.streams.check_soon()
    return SignedOut(sessions=number)


@router.get("/audit")
def list_audit(
    store: StoreDep,
    actor: Annotated[Word | None, Query(description="Only changes by this name.")] = None,
    action: Annotated[Word | None, Query(description='For example "campaign.pause".')] = None,
    target_kind: Annotated[Word | None, Query(description='For example "campaign".')] = None,
    target: Annotated[
        Word | None, Query(description="Only changes of the target with this name.")
    ] = None,
    since: Annotated[Moment | None, Query(description="At this time or later.")] = None,
    until: Annotated[Moment | None, Query(description="Before this time.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    cursor: Annotated[str | None, Query(max_length=80)] = None,
) -> AuditPage:
    """List who changed what and when, the newest change first."""
    # One entry more than the page shows whether there is a next page.
    found = store.access.audit(
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
        entries=page, next_cursor=write_cursor(page[-1].id) if len(found) > limit else None
    )


def _token(store: Store, record: TokenRecord) -> TokenRead:
    return TokenRead.of(record, is_valid=record.is_valid(store.now()))

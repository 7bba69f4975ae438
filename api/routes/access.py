"""Tokens, owners, groups, the audit, fair shares, quotas and webhooks."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from http import HTTPStatus
from typing import Annotated

from fastapi import Body, Path, Query, Request
from pydantic import StringConstraints
from starlette.concurrency import run_in_threadpool

from layout_tuner.api.dependencies import (
    CredentialDep,
    HolderDep,
    HubDep,
    SettingsDep,
    StoreDep,
)
from layout_tuner.api.errors import SignInCodeSourceError
from layout_tuner.api.http.cursors import read_cursor, write_cursor
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.http.request_bodies import BodyRoute
from layout_tuner.api.http.webhook_hosts import refuse_address
from layout_tuner.api.schemas.access import (
    AuditPage,
    DeviceCodeCreated,
    DeviceToken,
    GroupPage,
    GroupPut,
    OwnerPage,
    OwnerPut,
    QuotaPage,
    QuotaPut,
    SharePage,
    SignedOut,
    SignInCodeCreated,
    TokenCreate,
    TokenCreated,
    TokenId,
    TokenPage,
    TokenRead,
    WebhookCreate,
    WebhookPage,
    WhoAmI,
)
from layout_tuner.api.schemas.text_types import Moment
from layout_tuner.api.security.authentication import address_of, begin_guess
from layout_tuner.api.security.holders import Holder
from layout_tuner.results_db.access.tokens import TokenRecord, hash_of_token
from layout_tuner.results_db.actor import SYSTEM, QuotaKind, QuotaPeriod
from layout_tuner.results_db.errors import DeviceSignInRefusedError, TokenNotFoundError
from layout_tuner.results_db.service_records import GroupRead, OwnerRead, QuotaRead, WebhookRead
from layout_tuner.results_db.store import Store

router = LazyRouter(route_class=BodyRoute, prefix="/v1", tags=["access"])

# No name contains control characters, and PostgreSQL cannot store NUL.
Word = Annotated[str, StringConstraints(max_length=255, pattern=r"^[^\x00-\x1f\x7f]+$")]


@router.get("/whoami")
def read_whoami(holder: HolderDep, store: StoreDep) -> WhoAmI:
    """Read the name and the role of the request's token, and its owner with the groups."""
    return WhoAmI.of(
        holder,
        groups=store.owners.groups_of(holder.owner),
        expires_at=holder.ends_at or holder.expires_at,
    )


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


@router.post("/device-codes", status_code=HTTPStatus.CREATED)
async def create_device_code(
    host: Annotated[str, Body(embed=True, pattern=r"^[\x21-\x7e]{1,255}$")], request: Request
) -> DeviceCodeCreated:
    """Create a device code, with which a person allows the command line on a host (RFC 8628)."""
    address, state = address_of(request.scope), request.app.state
    begin_guess(state.authentication.guess_limit, address)
    own = state.store.by(replace(SYSTEM, address=address[:64]))
    secret, code = await run_in_threadpool(own.access.ask_for_device, host)
    interval_s = state.settings.device_poll_s
    return DeviceCodeCreated(secret=secret, code=code, interval_s=interval_s)


@router.post("/device-tokens", status_code=HTTPStatus.CREATED)
async def create_device_token(
    secret: Annotated[str, Body(embed=True, max_length=200)], request: Request
) -> DeviceToken:
    """Exchange the secret of a device code, or of a short token, for a token and another secret.

    400 with a word of RFC 8628 as its type: authorization_pending, access_denied or expired_token;
    or invalid_grant: a secret that was used before ends the sign-in.
    """
    state = request.app.state
    own = state.store.by(replace(SYSTEM, address=address_of(request.scope)[:64]))
    life = timedelta(seconds=state.settings.short_token_s)
    token, new = await run_in_threadpool(own.access.exchange_device_secret, secret, life)
    if (holder := await state.book.find(hash_of_token(token.encode()))) is None:
        raise DeviceSignInRefusedError("invalid_grant")  # the token that allowed it has ended
    lives_s = (holder.expires_at - own.now()).total_seconds()
    who = await run_in_threadpool(read_whoami, holder, own)
    return DeviceToken.of(who, token=token, secret=new, lives_s=lives_s)


@router.delete("/device-tokens", status_code=HTTPStatus.NO_CONTENT)
async def revoke_device_token(holder: HolderDep, store: StoreDep, hub: HubDep) -> None:
    """End the sign-in of the command line whose token this is."""
    if holder.ends_at is None or holder.token_id is None:
        raise TokenNotFoundError("the token is not one of `login --device`; an admin can revoke it")
    await revoke_token(holder.token_id, store, hub)


@router.post("/tokens", status_code=HTTPStatus.CREATED)
def create_token(body: TokenCreate, store: StoreDep) -> TokenCreated:
    """Create a token. Only this response contains it; the service stores a hash.

    409 if the name already has a valid token.
    """
    record, token = store.access.create_token(
        body.name, body.role, owner=body.owner, expires_at=body.expires_at
    )
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


@router.get("/owners")
def list_owners(store: StoreDep) -> OwnerPage:
    """List owners, to whom campaigns belong, by name."""
    return OwnerPage(owners=store.owners.all())


@router.put("/owners/{name}")
def put_owner(name: str, body: OwnerPut, store: StoreDep) -> OwnerRead:
    """Set the weight and the subject of an owner, who is added if new.

    Sign-ins of the subject before end.
    """
    return store.owners.put_owner(name, **body.model_dump())


@router.get("/groups")
def list_groups(holder: HolderDep, store: StoreDep) -> GroupPage:
    """List groups by name: an admin all of them, others those of which they are members."""
    return GroupPage(groups=store.owners.groups(of=None if holder.is_admin else holder.owner))


@router.put("/groups/{name}")
def put_group(name: str, body: GroupPut, store: StoreDep) -> GroupRead:
    """Set the weight and the members of a group, which is added if new.

    404 if a member is no owner, or if owners join or leave a group that does not exist; nothing is
    changed then.
    """
    return store.owners.put_group(name, **body.model_dump())


@router.delete("/groups/{name}", status_code=HTTPStatus.NO_CONTENT)
def delete_group(name: str, store: StoreDep) -> None:
    """Delete a group; campaigns that were for it are then private."""
    store.owners.delete_group(name)


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


def only_of(holder: Holder) -> str | None:
    """The owner whose figures a holder may see; None: those of all."""
    return None if holder.is_admin else holder.owner


@router.get("/shares")
def list_shares(store: StoreDep, holder: HolderDep) -> SharePage:
    """List what owners have had of clusters lately, and what they are entitled to.

    Without the role admin only one's own line.
    """
    return SharePage(shares=store.shares.find(owner=only_of(holder)))


@router.get("/quotas")
def list_quotas(store: StoreDep, holder: HolderDep) -> QuotaPage:
    """List quotas and what is used of them; without the role admin those in force for oneself."""
    return QuotaPage(quotas=store.quotas.find(owner=only_of(holder)))


@router.put("/quotas/{kind}/{name}/{period}")
def put_quota(
    kind: QuotaKind,
    name: Annotated[str, Path(max_length=64)],
    period: QuotaPeriod,
    body: QuotaPut,
    store: StoreDep,
) -> QuotaRead:
    """Set the quota of an owner or a group. As an owner, * is everyone without one of their own."""
    return store.quotas.put(kind, name, period, **body.model_dump())


@router.delete("/quotas/{kind}/{name}/{period}", status_code=HTTPStatus.NO_CONTENT)
def delete_quota(
    kind: QuotaKind, name: Annotated[str, Path(max_length=64)], period: QuotaPeriod, store: StoreDep
) -> None:
    """Take a quota away."""
    store.quotas.remove(kind, name, period)


def _token(store: Store, record: TokenRecord) -> TokenRead:
    return TokenRead.of(record, is_valid=record.is_valid(store.now()))


@router.get("/webhooks")
def list_webhooks(store: StoreDep) -> WebhookPage:
    """List the webhooks of the token's owner, for an admin, all."""
    return WebhookPage(webhooks=store.webhooks.all())


@router.post("/webhooks", status_code=HTTPStatus.CREATED)
def create_webhook(
    body: WebhookCreate, request: Request, store: StoreDep, settings: SettingsDep
) -> WebhookRead:
    """Make a webhook; only this answer has its secret. Its messages link to this address."""
    refuse_address(body.address, settings.webhook_hosts)
    return store.webhooks.add(link=str(request.base_url).rstrip("/"), **body.model_dump())


@router.delete("/webhooks/{webhook_id}", status_code=HTTPStatus.NO_CONTENT)
def delete_webhook(webhook_id: TokenId, store: StoreDep) -> None:
    """Delete a webhook, with the messages that wait."""
    store.webhooks.delete(webhook_id)


@router.post("/webhooks/{webhook_id}/test", status_code=HTTPStatus.ACCEPTED)
def test_webhook(webhook_id: TokenId, store: StoreDep) -> WebhookRead:
    """Turn a webhook on and send it a test; the list of webhooks shows the receiver's answer."""
    return store.webhooks.test(webhook_id)

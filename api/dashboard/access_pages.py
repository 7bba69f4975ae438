"""The pages of admins: tokens, the audit."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, cast

from fastapi import Form, Path, Query, Request
from fastapi.responses import HTMLResponse, Response
from pydantic import TypeAdapter

from layout_tuner.api.dependencies import HubDep, StoreDep
from layout_tuner.api.html.rendering import go_to, render
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.routes.access import Word, list_audit, revoke_token
from layout_tuner.api.schemas.access import TokenId
from layout_tuner.api.schemas.text_types import Moment
from layout_tuner.documents.duration import read_duration_s
from layout_tuner.documents.reading import read_choice
from layout_tuner.errors import CampaignInvalidError, SearchSpaceError
from layout_tuner.results_db.actor import TOKEN_ROLES, TokenRole
from layout_tuner.results_db.errors import TokenDuplicateError, TokenInvalidError
from layout_tuner.results_db.store import Store

router = LazyRouter()

AUDIT_PAGE: Final = 100
"""Entries of the audit on one page."""

FILTERS: Final = ("actor", "action", "target_kind", "target", "since", "until")

_Text = Annotated[str, Query(max_length=255)]
_Field = Annotated[str, Form(max_length=255)]


@router.get("/tokens")
def show_tokens(
    request: Request,
    store: StoreDep,
    all: Annotated[str, Query(max_length=4)] = "",  # noqa: A002
) -> HTMLResponse:
    """The tokens, the newest first, and a form for a new one."""
    return _tokens(request, store, is_all=bool(all))


@router.post("/tokens")
def do_create_token(
    request: Request,
    store: StoreDep,
    name: _Field = "",
    role: _Field = "",
    owner: _Field = "",
    expires_in: _Field = "",
) -> HTMLResponse:
    """Makes a token. Only this answer contains it, and no cache keeps it."""
    created, secret, refusal = None, "", ""
    try:
        chosen = cast(
            "TokenRole", read_choice(role, TOKEN_ROLES, CampaignInvalidError, field="role")
        )
        until = None
        if expires_in.strip():
            span = read_duration_s(expires_in.strip(), field="expires in")
            until = store.now() + timedelta(seconds=span)
        created, secret = store.access.create_token(
            name.strip(), chosen, owner=owner.strip() or None, expires_at=until
        )
    except (SearchSpaceError, TokenInvalidError, TokenDuplicateError) as error:
        refusal = str(error)
    given = (
        {} if created else {"name": name, "role": role, "owner": owner, "expires_in": expires_in}
    )
    page = _tokens(request, store, created=created, secret=secret, refusal=refusal, given=given)
    page.headers["Cache-Control"] = "no-store"
    return page


@router.post("/tokens/{token_id}/revoke")
async def do_revoke_token(
    request: Request, token_id: Annotated[TokenId, Path()], store: StoreDep, hub: HubDep
) -> Response:
    await revoke_token(token_id, store, hub)
    return go_to(request, "/tokens", done="revoked")


def _tokens(request: Request, store: Store, *, is_all: bool = False, **said: Any) -> HTMLResponse:
    return render(
        request,
        "tokens.html",
        tokens=store.access.tokens(revoked=is_all),
        now=store.now(),
        is_all=is_all,
        roles=TOKEN_ROLES,
        owners=store.owners.all(),
        **{"created": None, "secret": "", "refusal": "", "given": {}} | said,
    )


@router.get("/audit")
def show_audit(
    request: Request,
    store: StoreDep,
    actor: _Text = "",
    action: _Text = "",
    target_kind: _Text = "",
    target: _Text = "",
    since: _Text = "",
    until: _Text = "",
    cursor: _Text = "",
) -> HTMLResponse:
    """Who changed what and when, the newest change first."""
    written = dict(zip(FILTERS, (actor, action, target_kind, target, since, until), strict=True))
    page, refusal = None, ""
    try:
        page = list_audit(store, **_filters(written), limit=AUDIT_PAGE, cursor=cursor or None)
    except SearchSpaceError as error:
        refusal = str(error)
    asked = {name: text for name, text in written.items() if text}
    return render(request, "audit.html", page=page, refusal=refusal, given=written, asked=asked)


_MOMENT: Final = TypeAdapter[datetime](Moment)


def _filters(written: dict[str, str]) -> dict[str, Any]:
    """The filters that are filled in, times in UTC; SearchSpaceError if one cannot be read."""
    found: dict[str, Any] = {}
    for name, text in written.items():
        read, what = _word, "a word of printable characters"
        if name in ("since", "until"):
            read, what = _moment, "a time such as 2026-01-31T12:00"
        try:
            found[name] = read(text.strip()) if text.strip() else None
        except ValueError as error:
            raise CampaignInvalidError(f"{text[:80]!r} is not {what}", field=name) from error
    return found


_word: Final[Callable[[str], Any]] = TypeAdapter[str](Word).validate_python


def _moment(text: str) -> Any:
    given = datetime.fromisoformat(text)
    return _MOMENT.validate_python(given if given.tzinfo else given.replace(tzinfo=UTC))

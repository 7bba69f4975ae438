"""The page of webhooks: an owner's own, and for admins all."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Form, Path, Request
from fastapi.responses import HTMLResponse

from layout_tuner.api.dependencies import SettingsDep, StoreDep
from layout_tuner.api.html.rendering import render
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.routes.webhooks import WebhookId, create_webhook, update_webhook
from layout_tuner.api.schemas.webhooks import WebhookChange
from layout_tuner.results_db.errors import WebhookInvalidError
from layout_tuner.results_db.service_records import ADMIN_NOTICES, CAMPAIGN_NOTICES, WEBHOOK_FORMATS
from layout_tuner.results_db.store import Store

router = LazyRouter()


@router.get("/webhooks")
def show_webhooks(request: Request, store: StoreDep) -> HTMLResponse:
    return _page(request, store)


@router.post("/webhooks")
def do_add_webhook(
    request: Request,
    store: StoreDep,
    settings: SettingsDep,
    address: Annotated[str, Form(max_length=2000)] = "",
    format: Annotated[str, Form(max_length=20)] = "",  # noqa: A002 - a field of the form
    campaigns: Annotated[str, Form(max_length=64)] = "",
    events: Annotated[tuple[str, ...], Form()] = (),
) -> HTMLResponse:
    """Makes a webhook. Only this answer contains its secret, and no cache keeps it."""
    given = {"address": address.strip(), "format": format, "campaigns": campaigns.strip() or "*"}
    try:
        asked = WebhookChange(events=[*events], **given)  # type: ignore[arg-type]
        made = create_webhook(asked, request, store, settings)
    except WebhookInvalidError as error:
        return _page(request, store, refusal=str(error))
    return _page(request, store, secret=made.secret)


@router.post("/webhooks/{webhook_id}/{change}")
def do_change_webhook(
    request: Request,
    store: StoreDep,
    settings: SettingsDep,
    webhook_id: WebhookId,
    change: Annotated[Literal["test", "on", "off", "new-secret", "remove"], Path()],
) -> HTMLResponse:
    if change == "test":
        store.webhooks.test(webhook_id)
    elif change == "remove":
        store.webhooks.delete(webhook_id)
    else:
        is_new = change == "new-secret"
        asked = WebhookChange(new_secret=True) if is_new else WebhookChange(on=change == "on")
        secret = update_webhook(webhook_id, asked, store, settings).secret
        return _page(request, store, secret=secret)
    return _page(request, store)


def _page(request: Request, store: Store, **said: Any) -> HTMLResponse:
    events = CAMPAIGN_NOTICES + (ADMIN_NOTICES if request.state.holder.is_admin else ())
    given = {"formats": WEBHOOK_FORMATS, "events": events, "webhooks": store.webhooks.all()}
    page = render(request, "webhooks.html", **{"secret": None, "refusal": ""} | given | said)
    page.headers["Cache-Control"] = "no-store"
    return page

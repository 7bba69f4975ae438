"""Webhooks: where owners have messages of events sent."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import Path, Request

from layout_tuner.api.dependencies import SettingsDep, StoreDep
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.http.request_bodies import BodyRoute
from layout_tuner.api.http.webhook_hosts import refuse_address
from layout_tuner.api.schemas.access import TokenId
from layout_tuner.api.schemas.webhooks import WebhookChange, WebhookPage
from layout_tuner.results_db.service_records import WebhookMessageRead, WebhookRead

router = LazyRouter(route_class=BodyRoute, prefix="/v1", tags=["webhooks"])

WebhookId = Annotated[TokenId, Path()]


@router.get("/webhooks")
def list_webhooks(store: StoreDep) -> WebhookPage:
    """List the webhooks of the token's owner, with their last messages; for an admin, all."""
    return WebhookPage(webhooks=store.webhooks.all())


@router.post("/webhooks", status_code=HTTPStatus.CREATED)
def create_webhook(
    body: WebhookChange, request: Request, store: StoreDep, settings: SettingsDep
) -> WebhookRead:
    """Make a webhook; only this answer has its secret. Its messages link to this address."""
    refuse_address(body.address, settings.webhook_hosts)
    given = body.model_dump(exclude={"on", "new_secret"})
    return store.webhooks.put(None, rotate=True, link=str(request.base_url).rstrip("/"), **given)


@router.patch("/webhooks/{webhook_id}")
def update_webhook(
    webhook_id: WebhookId, body: WebhookChange, store: StoreDep, settings: SettingsDep
) -> WebhookRead:
    """Change a webhook, turn it on or off, or give it another secret."""
    given: dict[str, Any] = body.model_dump(exclude_unset=True, exclude={"new_secret"})
    if "address" in given:
        refuse_address(body.address, settings.webhook_hosts)
    if "on" in given:
        given["off_because"] = "" if given.pop("on") else "its owner turned it off"
    return store.webhooks.put(webhook_id, rotate=body.new_secret, **given)


@router.delete("/webhooks/{webhook_id}", status_code=HTTPStatus.NO_CONTENT)
def delete_webhook(webhook_id: WebhookId, store: StoreDep) -> None:
    """Delete a webhook, with the messages that wait."""
    store.webhooks.delete(webhook_id)


@router.post("/webhooks/{webhook_id}/test", status_code=HTTPStatus.ACCEPTED)
def test_webhook(webhook_id: WebhookId, store: StoreDep) -> WebhookMessageRead:
    """Send a test message; the list of webhooks shows what becomes of it."""
    return store.webhooks.test(webhook_id)

"""Webhooks: where owners have messages of events sent."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Request

from layout_tuner.api.dependencies import SettingsDep, StoreDep
from layout_tuner.api.http.request_bodies import BodyRoute
from layout_tuner.api.http.webhook_hosts import refuse_address
from layout_tuner.api.schemas.access import TokenId, WebhookCreate, WebhookPage
from layout_tuner.results_db.service_records import WebhookRead

router = APIRouter(route_class=BodyRoute, prefix="/v1", tags=["webhooks"])

WebhookId = Annotated[TokenId, Path()]


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
def delete_webhook(webhook_id: WebhookId, store: StoreDep) -> None:
    """Delete a webhook, with the messages that wait."""
    store.webhooks.delete(webhook_id)


@router.post("/webhooks/{webhook_id}/test", status_code=HTTPStatus.ACCEPTED)
def test_webhook(webhook_id: WebhookId, store: StoreDep) -> WebhookRead:
    """Turn a webhook on and send it a test; the list of webhooks shows the receiver's answer."""
    return store.webhooks.test(webhook_id)

"""The documents of webhooks."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from layout_tuner.api.schemas.campaigns_and_trials import Document, Request
from layout_tuner.results_db.service_records import CAMPAIGN_NOTICES, WebhookRead


class WebhookChange(Request):
    """A new webhook, or changes of one: then what is left out stays."""

    address: Annotated[str, Field(max_length=2000)] = ""
    """Where messages go: https, and of a host that an administrator allows."""
    format: str = "standard"
    """standard, as Standard Webhooks has it; slack or mattermost."""
    events: list[str] = Field(default_factory=lambda: [*CAMPAIGN_NOTICES])
    """Also node.set_aside and worker.lost, for administrators."""
    campaigns: Annotated[str, Field(min_length=1, max_length=64)] = "*"
    """Of which campaigns: a name, or a pattern with * and ?."""
    on: bool = True
    """false: nothing is sent until it is on again."""
    new_secret: bool = False
    """For a day messages are then also signed with the secret of before."""


class WebhookPage(Document):
    """The webhooks of an owner; for administrators those of all."""

    webhooks: list[WebhookRead]

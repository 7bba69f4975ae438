"""What routes are given: the store, the settings, a campaign by its id or name."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, cast

from fastapi import Depends, Path, Request

from api.errors import PageInvalidError
from api.event_hub import EventHub
from api.schemas import MAX_ID
from api.settings import Settings
from api.token_book import Holder, TokenBook
from api.worker_batches import WorkerBatches
from results_db.actor import Actor
from results_db.records import CampaignRecord
from results_db.store import Store


async def get_store(request: Request) -> Store:
    """The service's store, acting in the name of whoever asks.

    A coroutine, as whatever does not wait: FastAPI would give a function a thread.
    """
    store = cast("Store", request.app.state.store)
    actor: Actor | None = getattr(request.state, "actor", None)
    return store if actor is None else store.by(actor)


async def get_settings(request: Request) -> Settings:
    """The service's settings."""
    return cast("Settings", request.app.state.settings)


async def get_actor(request: Request) -> Actor:
    """Who asks, as the gate found out."""
    return cast("Actor", request.state.actor)


async def get_holder(request: Request) -> Holder:
    """Whose token the request carries."""
    return cast("Holder", request.state.holder)


async def get_book(request: Request) -> TokenBook:
    """What this process knows of tokens."""
    return cast("TokenBook", request.app.state.book)


async def get_hub(request: Request) -> EventHub:
    """The service's live events."""
    return cast("EventHub", request.app.state.hub)


async def get_batches(request: Request) -> WorkerBatches:
    """Where leases and outcomes wait for each other."""
    return cast("WorkerBatches", request.app.state.batches)


BatchesDep = Annotated[WorkerBatches, Depends(get_batches)]
HubDep = Annotated[EventHub, Depends(get_hub)]
StoreDep = Annotated[Store, Depends(get_store)]
SettingsDep = Annotated[Settings, Depends(get_settings)]
ActorDep = Annotated[Actor, Depends(get_actor)]
HolderDep = Annotated[Holder, Depends(get_holder)]
BookDep = Annotated[TokenBook, Depends(get_book)]


def campaign_reference(named: str) -> int | str:
    """What a path calls a campaign: its id where it is a number, which no name is, else its name."""
    if named.isascii() and named.isdigit() and int(named) <= MAX_ID:
        return int(named)
    return named


CampaignName = Annotated[str, Path(description="The campaign's name or id.", max_length=64)]


def get_campaign(campaign: CampaignName, store: StoreDep) -> CampaignRecord:
    """The campaign that a path names."""
    return campaign_named(campaign_reference(campaign), store)


def campaign_named(reference: int | str, store: Store) -> CampaignRecord:
    """The campaign with an id or a name, as `campaign_reference` tells them apart."""
    if isinstance(reference, int):
        return store.campaign(reference)
    return store.campaign_by_name(reference)


CampaignDep = Annotated[CampaignRecord, Depends(get_campaign)]


def write_cursor(position: int) -> str:
    """A page's end as clients carry it; what is in it is our business."""
    return base64.urlsafe_b64encode(str(position).encode()).decode().rstrip("=")


def read_cursor(cursor: str | None) -> int | None:
    """Reads `write_cursor` back.

    Raises:
        PageInvalidError: this service never wrote it.
    """
    if cursor is None:
        return None
    try:
        text = base64.urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4)).decode()
        position = int(text) if text.isascii() and text.isdigit() else -1
    except (binascii.Error, ValueError) as error:
        raise PageInvalidError(f"cursor {cursor[:80]!r} is not one of this service") from error
    if not 0 <= position <= MAX_ID:
        raise PageInvalidError(f"cursor {cursor[:80]!r} is not one of this service")
    return position

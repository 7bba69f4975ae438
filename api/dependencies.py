"""Parameters of routes that FastAPI injects: the store, the settings, a campaign by id or name."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import Depends, Path, Request

from api.errors import CampaignOwnedError
from api.leases.worker_batches import WorkerBatches
from api.live.database_changes import DatabaseChanges
from api.live.event_hub import EventHub
from api.process.metrics import Metrics
from api.schemas.text_types import campaign_reference
from api.security.authentication import Credential
from api.security.holders import Holder
from api.security.roles import Owners, whose
from api.settings import Settings
from results_db.actor import Actor
from results_db.records import CampaignRecord
from results_db.store import Store


def _of_app(name: str) -> Any:
    """A dependency that reads an attribute of the application's state."""

    async def read(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(read)


def _of_request(name: str) -> Any:
    """A dependency that reads what the access check has noted of the request."""

    async def read(request: Request) -> Any:
        return getattr(request.state, name)

    return Depends(read)


async def get_store(request: Request) -> Store:
    """The service's store; its audit names the actor of the request.

    This and the others are coroutines because FastAPI calls a function in a thread.
    """
    store = cast("Store", request.app.state.store)
    actor: Actor | None = getattr(request.state, "actor", None)
    return store if actor is None else store.by(actor)


BatchesDep = Annotated[WorkerBatches, _of_app("batches")]
ChangesDep = Annotated[DatabaseChanges, _of_app("changes")]
HubDep = Annotated[EventHub, _of_app("hub")]
MetricsDep = Annotated[Metrics, _of_app("metrics")]
OwnersDep = Annotated[Owners, _of_app("owners")]
SettingsDep = Annotated[Settings, _of_app("settings")]
StoreDep = Annotated[Store, Depends(get_store)]
ActorDep = Annotated[Actor, _of_request("actor")]
HolderDep = Annotated[Holder, _of_request("holder")]
"""Who asks: the name and the role of the token."""
CredentialDep = Annotated[Credential, _of_request("credential")]
"""What the request was authenticated with."""


CampaignName = Annotated[str, Path(description="The campaign's name or id.", max_length=64)]


def get_campaign(campaign: CampaignName, store: StoreDep) -> CampaignRecord:
    reference = campaign_reference(campaign)
    if isinstance(reference, int):
        return store.campaigns.get(reference)
    return store.campaigns.by_name(reference)


CampaignDep = Annotated[CampaignRecord, Depends(get_campaign)]


async def get_own_campaign(campaign: CampaignDep, actor: ActorDep) -> CampaignRecord:
    """The campaign of a path, for routes that change it.

    The owner of the name was checked, but by now another campaign may have that name. The route
    changes the campaign with the id of this record, whose owner never changes.

    Raises:
        CampaignOwnedError: the actor is neither its owner nor an admin.
    """
    if actor.role != "admin" and campaign.created_by != actor.name:
        raise CampaignOwnedError(whose("campaign", campaign.name, campaign.created_by, actor.name))
    return campaign


OwnCampaignDep = Annotated[CampaignRecord, Depends(get_own_campaign)]

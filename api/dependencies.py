"""Parameters of routes that FastAPI injects: the store, the settings, a campaign by id or name."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any, cast

from fastapi import Depends, Path, Request

from layout_tuner.api.errors import CampaignOwnedError
from layout_tuner.api.leases.worker_batches import WorkerBatches
from layout_tuner.api.live.database_changes import DatabaseChanges
from layout_tuner.api.live.event_hub import EventHub
from layout_tuner.api.process.metrics import Metrics
from layout_tuner.api.schemas.text_types import campaign_reference
from layout_tuner.api.security.authentication import Credential
from layout_tuner.api.security.holders import Holder
from layout_tuner.api.security.roles import OwnersOfThings, whose
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.actor import Actor
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.store import Store


def _from(path: str) -> Any:
    """A dependency that reads what a request has at a path of attributes."""
    find = attrgetter(path)

    async def read(request: Request) -> Any:
        return find(request)

    return Depends(read)


async def get_store(request: Request) -> Store:
    """The service's store; its audit names the actor of the request.

    This and the others are coroutines because FastAPI calls a function in a thread.
    """
    store = cast("Store", request.app.state.store)
    actor: Actor | None = getattr(request.state, "actor", None)
    return store if actor is None else store.by(actor)


BatchesDep = Annotated[WorkerBatches, _from("app.state.batches")]
ChangesDep = Annotated[DatabaseChanges, _from("app.state.changes")]
HubDep = Annotated[EventHub, _from("app.state.hub")]
MetricsDep = Annotated[Metrics, _from("app.state.metrics")]
OwnersDep = Annotated[OwnersOfThings, _from("app.state.owners")]
SettingsDep = Annotated[Settings, _from("app.state.settings")]
StoreDep = Annotated[Store, Depends(get_store)]
ActorDep = Annotated[Actor, _from("state.actor")]
HolderDep = Annotated[Holder, _from("state.holder")]
"""The name and the role of the token of the request."""
CredentialDep = Annotated[Credential, _from("state.credential")]
"""The token or session that authenticated the request."""


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
    if actor.role != "admin" and campaign.created_by != actor.owner:
        raise CampaignOwnedError(whose("campaign", campaign.name, campaign.created_by, actor.owner))
    return campaign


OwnCampaignDep = Annotated[CampaignRecord, Depends(get_own_campaign)]

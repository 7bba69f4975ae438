"""Whether what a path names belongs to whoever asks; a submitter changes nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Final

from fastapi import Depends
from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool

from api.access import Owned
from api.dependencies import ActorDep, CampaignDep, campaign_reference
from api.errors import CampaignOwnedError
from api.schemas import TrialId
from results_db.errors import ValueUnstorableError
from results_db.records import CampaignRecord
from results_db.store import Store


class Owners:
    """Asks the store whose things are, as paths name them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._parameter_and_owner: Mapping[Owned, tuple[str, Callable[[str], str | None]]] = {
            "campaign": ("campaign", self._of_campaign),
            "trial": ("trial_id", self._of_trial),
            "model": ("name", self._of_model),
            "cluster": ("name", self._of_cluster),
        }

    async def why_not(self, owned: Owned, named: Mapping[str, str], asker: str) -> str | None:
        """Why this thing is not for the asker to change; None where it is, or where there is none."""
        parameter, find_owner = self._parameter_and_owner[owned]
        name = named[parameter]
        try:
            owner = await run_in_threadpool(find_owner, name)
        except ValueUnstorableError:
            return None  # nothing is called that: the route says so
        return None if owner is None or owner == asker else _whose(owned, name, owner, asker)

    def _of_campaign(self, named: str) -> str | None:
        reference = campaign_reference(named)
        if isinstance(reference, int):
            return self._store.owner_of_campaign(reference)
        return self._store.owner_of_campaign_named(reference)

    def _of_trial(self, named: str) -> str | None:
        """None too where it is no number: the route says so."""
        try:
            trial_id = _TRIAL_ID.validate_python(named)
        except ValidationError:
            return None
        return self._store.owner_of_trial(trial_id)

    def _of_model(self, named: str) -> str | None:
        return self._store.owner_of_model(named)

    def _of_cluster(self, named: str) -> str | None:
        return self._store.owner_of_cluster(named)


async def get_own_campaign(campaign: CampaignDep, actor: ActorDep) -> CampaignRecord:
    """The campaign that a path names, for whoever may change it.

    The gate has asked whose the name is, too; by now it may be another campaign's. What is changed is the
    campaign of this record's id, which is nobody else's ever.

    Raises:
        CampaignOwnedError: it is somebody else's, and this one is no admin.
    """
    if actor.role != "admin" and campaign.created_by != actor.name:
        raise CampaignOwnedError(_whose("campaign", campaign.name, campaign.created_by, actor.name))
    return campaign


OwnCampaignDep = Annotated[CampaignRecord, Depends(get_own_campaign)]


def _whose(owned: Owned, name: str, owner: str, asker: str) -> str:
    whose = f"belongs to {owner!r}" if owner else "is from before campaigns belonged to anybody"
    return (
        f"the {owned} {name[:80]!r} {whose}, and the token {asker!r} changes only what was made in its "
        f"own name; ask {f'{owner!r} or an admin' if owner else 'an admin'}"
    )


_TRIAL_ID: Final = TypeAdapter[int](TrialId)
"""Reads a trial's id as routes do, which take "+7" for 7."""

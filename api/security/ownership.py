"""Ownership: a token changes only campaigns, trials, models, clusters and workers of its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Final

from pydantic import TypeAdapter, ValidationError
from starlette.concurrency import run_in_threadpool

from api.schemas.text_types import campaign_reference
from api.security.roles import Owned
from results_db.errors import ValueUnstorableError
from results_db.store import Store
from search_spaces.protocol.worker_messages import TrialId

MOST_WORKERS: Final = 4096
"""Sessions of workers whose owners a process keeps."""


class Owners:
    """Finds the owner of what a path names."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._parameter_and_owner: Mapping[Owned, tuple[str, Callable[[str], str | None]]] = {
            "campaign": ("campaign", self._of_campaign),
            "trial": ("trial_id", self._of_trial),
            "model": ("name", partial(store.catalogue.owner_of, "model")),
            "cluster": ("name", partial(store.catalogue.owner_of, "cluster")),
            # A session's owner never changes, and workers ask every second.
            "worker": ("worker_id", lru_cache(MOST_WORKERS)(store.workers.owner_of)),
        }

    async def why_not(self, owned: Owned, named: Mapping[str, str], asker: str) -> str | None:
        """Why the asker may not change this; None: it may, or there is no such thing."""
        parameter, find_owner = self._parameter_and_owner[owned]
        name = named[parameter]
        try:
            owner = await run_in_threadpool(find_owner, name)
        except ValueUnstorableError:
            return None  # there is none of this name, and the route answers so
        return None if owner is None or owner == asker else whose(owned, name, owner, asker)

    def _of_campaign(self, named: str) -> str | None:
        return self._store.access.owner_of_campaign(campaign_reference(named))

    def _of_trial(self, named: str) -> str | None:
        """None also if it is not a number: the route refuses it."""
        try:
            trial_id = _TRIAL_ID.validate_python(named)
        except ValidationError:
            return None
        return self._store.access.owner_of_trial(trial_id)


def whose(owned: Owned, name: str, owner: str, asker: str) -> str:
    """Why a token may not change what belongs to another."""
    return (
        f"the {owned} {name[:80]!r} belongs to {owner!r}, and the token {asker!r} changes only "
        f"things of its own name; ask {owner!r} or an admin"
    )


_TRIAL_ID: Final = TypeAdapter[int](TrialId)
"""Reads a trial's id as the routes do, which accept "+7" for 7."""

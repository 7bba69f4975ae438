"""Makes the plans of large spaces that the service has left to the driver, one at a time.

Owners take turns, so that one owner's plans do not keep out another's.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from functools import partial
from operator import itemgetter
from typing import Final

from layout_tuner.errors import SearchSpaceError
from layout_tuner.predictions.belief.plan import Plan
from layout_tuner.results_db.campaigns.plans import PlanOptions
from layout_tuner.results_db.errors import DatabaseUnavailableError
from layout_tuner.results_db.owner_turns import OwnerTurns
from layout_tuner.results_db.records import PlanRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.stored_campaign import StoredCampaign
from layout_tuner.tuner.driver.background_work import MemoryPause, start_beside

_log: Final = logging.getLogger("layout_tuner.tuner.driver.driver")


class PlanMaker:
    """The plan that is being made, on a thread beside the driver's rounds.

    A driver that ends leaves the plan waiting, and the next one makes it again.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._making: tuple[PlanRecord, Future[Plan]] | None = None
        self._turns = OwnerTurns()
        self._memory = MemoryPause()

    def step(self) -> None:
        """Stores a plan that is made, and begins the next one that waits."""
        if self._making is not None:
            record, made = self._making
            if not made.done():
                return
            self._making = None
            self._end(record, made)
        if self._memory.is_over:
            for plan_id, owner in self._turns.order(self._store.plans.waiting(), itemgetter(1)):
                self._turns.note(owner)
                record = self._store.plans.get(plan_id)
                self._making = record, start_beside("plan", partial(self._make, record))
                break

    def _make(self, record: PlanRecord) -> Plan:
        return self._store.plans.make(
            StoredCampaign(document=record.spec).spec,
            PlanOptions.from_mapping(record.options),
            at=record.created_at,
            owner=record.created_by,
        )

    def _end(self, record: PlanRecord, made: Future[Plan]) -> None:
        error = made.exception()
        if isinstance(error, DatabaseUnavailableError):
            return  # it still waits, and is made again
        if isinstance(error, MemoryError):
            _log.warning("plan %d: %s", record.id, self._memory.begin("it"))
            return
        self._memory.end()
        if isinstance(error, SearchSpaceError):
            self._store.plans.end(record.id, str(error))
        elif error is not None:
            # One plan must not stop the campaigns.
            _log.error("plan %d cannot be made", record.id, exc_info=error)
            said = f"the driver cannot make it: {type(error).__name__}: {error}"
            self._store.plans.end(record.id, said)
        else:
            self._store.plans.end(record.id, made.result())
            _log.info("plan %d is made", record.id)

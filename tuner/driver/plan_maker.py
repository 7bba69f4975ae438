"""Makes the plans of large spaces that the service has left to the driver, one at a time."""

from __future__ import annotations

import logging
import threading
from typing import Final

from results_db.campaigns.plans import PlanOptions
from results_db.errors import DatabaseUnavailableError
from results_db.records import PlanRecord
from results_db.store import Store
from search_spaces.belief.plan import Plan
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.errors import SearchSpaceError

_log: Final = logging.getLogger("tuner.driver.driver")


class PlanMaker:
    """The plan that is being made, on a thread beside the driver's rounds.

    A driver that ends leaves the plan waiting, and the next one makes it again.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._making: _Making | None = None

    def step(self) -> None:
        """Stores a plan that is made, and begins the next one that waits."""
        if self._making is not None:
            if self._making.is_alive():
                return
            made, self._making = self._making, None
            self._end(made)
        waiting = self._store.plans.next_open()
        if waiting is not None:
            self._making = _Making(self._store, waiting)

    def _end(self, made: _Making) -> None:
        if isinstance(made.result, DatabaseUnavailableError):
            return  # it still waits, and is made again
        if isinstance(made.result, SearchSpaceError):
            self._store.plans.end(made.record.id, str(made.result))
        elif isinstance(made.result, Exception):
            # One plan must not stop the campaigns.
            _log.error("plan %d cannot be made", made.record.id, exc_info=made.result)
            said = f"the driver cannot make it: {type(made.result).__name__}: {made.result}"
            self._store.plans.end(made.record.id, said)
        else:
            self._store.plans.end(made.record.id, made.result)
            _log.info("plan %d is made", made.record.id)


class _Making(threading.Thread):
    def __init__(self, store: Store, record: PlanRecord) -> None:
        super().__init__(name="plan", daemon=True)
        self.record = record
        self._store = store
        self.result: Plan | Exception = RuntimeError("its thread ended without a result")
        self.start()

    def run(self) -> None:
        try:
            self.result = self._store.plans.make(
                CampaignSpec.from_mapping(self.record.spec),
                PlanOptions.from_mapping(self.record.options),
                at=self.record.created_at,
            )
        except Exception as error:
            self.result = error

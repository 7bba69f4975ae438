"""Tenures: of all drivers on a database one is active; the others stand by and take over when it falls silent."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Final, Self

from results_db.driver_lease import DRIVER_LEASE_S, DriverLease
from results_db.errors import DriverLeaseLostError, ResultsDbError
from results_db.store import Store

RENEWAL_INTERVAL_S: Final = 1.0
STUCK_AFTER_S: Final = 900.0
"""A round that takes longer will not end any more: another driver shall have a try."""

_log: Final = logging.getLogger("tuner.tenure")


class Standby:
    """Watches the active driver."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: DriverLease | None = None
        self._seen_at = 0.0

    def take_over(self) -> DriverLease | None:
        """Makes this driver the active one if there is none; None while another is at work.

        One is taken to be gone when its lease ran out by the clock, or when nothing of it changed for as
        long by our own count: the clock may have been set back.
        """
        lease = self._store.driver_lease()
        if lease != self._seen:
            if self._seen is None and not lease.is_free(self._store.now()):
                _log.info("standing by: the driver %d on %s is at work", lease.pid, lease.host)
            self._seen, self._seen_at = lease, time.monotonic()
        if lease.is_free(self._store.now()):
            return self._store.acquire_driver_lease()
        if time.monotonic() - self._seen_at > DRIVER_LEASE_S:
            return self._store.acquire_driver_lease(unchanged=lease)
        return None


class Tenure:
    """The time for which this driver is the active one; a thread says all the while that it is at work."""

    def __init__(self, store: Store, lease: DriverLease) -> None:
        self._store = store
        self._fence = lease.fence
        self._ending = threading.Event()
        self._is_lost = False
        self._round_began = time.monotonic()
        self._thread = threading.Thread(target=self._renew, name="driver-lease", daemon=True)

    def __enter__(self) -> Self:
        _log.info("tenure %d: this is the active driver", self._fence)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ending.set()
        self._thread.join()
        if self._is_lost:
            return
        try:
            self._store.release_driver_lease(self._fence)
        except ResultsDbError as refusal:
            # It runs out by itself.
            _log.warning("tenure %d was not given back: %s", self._fence, refusal)

    def goes_on(self) -> bool:
        """Whether this driver is still the active one, as far as it knows; asked between two rounds."""
        self._round_began = time.monotonic()
        return not self._is_lost

    def _renew(self) -> None:
        while not self._ending.wait(RENEWAL_INTERVAL_S):
            if time.monotonic() - self._round_began > STUCK_AFTER_S:
                _log.error("a round takes more than %.0f s: no longer renewed", STUCK_AFTER_S)
                self._is_lost = True
                return
            try:
                self._store.renew_driver_lease(self._fence)
            except DriverLeaseLostError as error:
                _log.warning("%s", error)
                self._is_lost = True
                return
            except ResultsDbError as error:
                _log.warning("tenure %d is not renewed: %s", self._fence, error)

"""The driver process: it stands by until it holds the driver lease, and drives until a signal.

Of all drivers on a database, the one that holds the lease is active. The others stand by, and one
of them takes over when the lease runs out.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from types import FrameType, TracebackType
from typing import Final, Self

from layout_tuner.protocol.connection.outage_log import OutageLog
from layout_tuner.results_db.campaigns.driver_lease import DRIVER_LEASE_S, DriverLease
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.database.stderr_log import log_to_stderr
from layout_tuner.results_db.database.wait_for_server import once_it_answers
from layout_tuner.results_db.errors import (
    DatabaseUnavailableError,
    DriverLeaseLostError,
    ResultsDbError,
)
from layout_tuner.results_db.store import Store
from layout_tuner.timing_mark import wait_while_timing
from layout_tuner.tuner.driver.campaign_opening import BackgroundOpening
from layout_tuner.tuner.driver.driver import Driver
from layout_tuner.tuner.driver.open_limits import OpenLimits

STANDBY_INTERVAL_S: Final = 0.5
RENEWAL_INTERVAL_S: Final = 1.0
SQLITE_RENEWS_EVERY: Final = 2
"""Intervals between renewals on SQLite: all of its drivers are on one machine, without a
network between them and the database, and each renewal writes to the disk."""
STUCK_AFTER_S: Final = 900.0
"""A round that takes longer is taken to hang: the lease is no longer renewed."""
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

_log: Final = logging.getLogger("layout_tuner.tuner.driver.process")


def drive(
    data_dir: Path | None, database: str | None = None, limits: OpenLimits | None = None
) -> None:
    """Drives the campaigns of a database until SIGTERM or SIGINT, while no other driver does.

    The database is that of a data directory, the default one for None, or a PostgreSQL. The limits
    bound the open searches.

    Raises:
        ResultsDbError: it cannot be used, or a newer version wrote it.
    """
    data = DataDir.default() if data_dir is None else DataDir(data_dir)
    log_to_stderr("layout_tuner")
    stop = StopRequest()
    for number in STOP_SIGNALS:
        signal.signal(number, stop.note)
    try:
        opened = once_it_answers(lambda: Store.open(data, database=database), sleep=stop.sleep)
    except StopRequested:
        return
    with closing(opened) as store:
        while not stop.is_requested:
            _drive_once(store, stop, limits)
    _log.info("stopped by a signal; campaigns go on when a driver is started again")


def _drive_once(store: Store, stop: StopRequest, limits: OpenLimits | None) -> None:
    """Waits for the driver lease, and drives until another driver has taken over."""
    standby = Standby(store)
    outage = OutageLog(_log, "looking for an active driver")
    while not stop.wait(0):
        try:
            lease = standby.take_over()
        except DatabaseUnavailableError as error:
            outage.failed("cannot see whether another driver is active", error)
            lease = None
        else:
            outage.worked()
        if lease is not None:
            break
        stop.wait(STANDBY_INTERVAL_S)
    else:
        return
    with HeldLease(store, lease) as held:
        own = store.as_driver(lease.fence)
        driver = Driver(own, opening=BackgroundOpening(), limits=limits)

        def must_stop(pause_s: float) -> bool:
            """Pauses; a round beside timed iterations would take cores of the ranks.

            It can wait until two trials have ended: one more is open than the devices run.
            """
            least = max(driver.num_open_trials() - 1, 1)
            ended = stop.wait(pause_s) or wait_while_timing(
                stop.wait, can_wait=lambda: driver.num_open_trials() >= least
            )
            return ended or not held.is_held()

        driver.run(must_stop)


class StopRequested(Exception):  # noqa: N818 - it is no error
    """A signal has asked the process to stop."""


class StopRequest:
    """Whether a signal has asked the process to stop; the current round is finished first.

    The handler writes to a pipe, which ends a pause: a handler that sets a `threading.Event` can
    interrupt the thread that holds the event's lock.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._reader, self._writer = os.pipe()

    def note(self, _number: int, _frame: FrameType | None) -> None:
        if not self.is_requested:
            self.is_requested = True
            os.write(self._writer, b"!")

    def wait(self, pause_s: float) -> bool:
        """Pauses, at most until a signal comes; returns whether one came."""
        if not self.is_requested and pause_s > 0:
            select.select([self._reader], [], [], pause_s)
        return self.is_requested

    def sleep(self, pause_s: float) -> None:
        """Pauses; StopRequested if a signal came."""
        if self.wait(pause_s):
            raise StopRequested


class Standby:
    """Watches the lease of the active driver."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen: DriverLease | None = None
        self._seen_at = 0.0

    def take_over(self) -> DriverLease | None:
        """Takes the lease if no driver is active; returns None while one is.

        A driver counts as gone when its lease has run out by the database's clock, or when the
        lease has not changed for as long by this process's monotonic clock: the other clock may
        have been set back.
        """
        lease = self._store.driver.lease()
        if lease != self._seen:
            if self._seen is None and not lease.is_free(self._store.now()):
                _log.info("standing by: the driver %d on %s is active", lease.pid, lease.host)
            self._seen, self._seen_at = lease, time.monotonic()
        if lease.is_free(self._store.now()):
            return self._store.driver.acquire()
        if time.monotonic() - self._seen_at > DRIVER_LEASE_S:
            return self._store.driver.acquire(unchanged=lease)
        return None


class HeldLease:
    """The driver lease while this process holds it; a thread renews it."""

    def __init__(self, store: Store, lease: DriverLease) -> None:
        self._store = store
        self._interval_s = RENEWAL_INTERVAL_S * (1 if store.is_shared else SQLITE_RENEWS_EVERY)
        self._fence = lease.fence
        self._ending = threading.Event()
        self._is_lost = False
        self._round_began = time.monotonic()
        self._thread = threading.Thread(target=self._renew, name="driver-lease", daemon=True)

    def __enter__(self) -> Self:
        _log.info("driver lease %d: this is the active driver", self._fence)
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
            self._store.driver.release(self._fence)
        except ResultsDbError as refusal:
            _log.warning("driver lease %d was not released, and runs out: %s", self._fence, refusal)

    def is_held(self) -> bool:
        """Whether this driver is still active, as far as it knows; called before each round."""
        self._round_began = time.monotonic()
        return not self._is_lost

    def _renew(self) -> None:
        outage = OutageLog(_log, f"renewing driver lease {self._fence}")
        while not self._ending.wait(self._interval_s):
            if time.monotonic() - self._round_began > STUCK_AFTER_S:
                _log.error("a round takes more than %.0f s: no longer renewed", STUCK_AFTER_S)
                self._is_lost = True
                return
            try:
                self._store.driver.renew(self._fence)
            except DriverLeaseLostError as error:
                _log.warning("%s", error)
                self._is_lost = True
                return
            except ResultsDbError as error:
                outage.failed(f"driver lease {self._fence} is not renewed", error)
            else:
                outage.worked()

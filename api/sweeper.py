"""Takes back leases that have run out, once a second, while the service runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Final

from starlette.concurrency import run_in_threadpool

from results_db.errors import ResultsDbError
from results_db.part import Clock, utc_now
from results_db.store import Store

ASLEEP_S: Final = 5.0
"""A sweep that comes this much too late means that the service was asleep (suspended, starved)."""

_log = logging.getLogger(__name__)


class Sweeper:
    """Leases do not run out while the service is down or asleep: nobody could extend them then."""

    def __init__(
        self,
        store: Store,
        *,
        lease_s: float,
        interval_s: float,
        clock: Clock = utc_now,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Looks at two clocks, since either can stand still while the other goes on.

        Args:
            store: whose leases are swept.
            lease_s: seconds that a lease gets when it is extended.
            interval_s: seconds between two sweeps.
            clock: the time that leases are written in; it goes on while the machine is suspended.
            monotonic: seconds that nobody can set, but which may not count while suspended.
        """
        self._store = store
        self._lease_s = lease_s
        self._interval_s = interval_s
        self._clock = clock
        self._monotonic = monotonic
        self._last_sweep: tuple[datetime, float] | None = None

    def sweep(self) -> None:
        """Takes back what has run out; the first sweep, and one after a sleep, extends instead."""
        now = (self._clock(), self._monotonic())
        if self._was_away(now):
            self._store.extend_leases(lease_s=self._lease_s)
        else:
            for trial_id in self._store.expire_leases():
                _log.warning("the lease of trial %d has run out", trial_id)
        # Only now: a sweep that failed has not happened, and an extension is tried again.
        self._last_sweep = now

    async def run(self) -> None:
        """Sweeps until cancelled."""
        while True:
            try:
                await run_in_threadpool(self.sweep)
            except ResultsDbError as error:
                _log.warning("no lease was taken back: %s", error)
            except Exception:
                # The next sweep tries again: without sweeps, no trial of a lost worker comes back.
                _log.exception("no lease was taken back")
            await asyncio.sleep(self._interval_s)

    def _was_away(self, now: tuple[datetime, float]) -> bool:
        if self._last_sweep is None:
            return True
        wall, monotonic = self._last_sweep
        passed_s = max((now[0] - wall).total_seconds(), now[1] - monotonic)
        return passed_s > self._interval_s + ASLEEP_S


@asynccontextmanager
async def sweeping(sweeper: Sweeper) -> AsyncIterator[None]:
    """Sweeps in the background while the block runs."""
    # Before the first request: leases are extended before anybody can ask for them.
    await run_in_threadpool(sweeper.sweep)
    task = asyncio.create_task(sweeper.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

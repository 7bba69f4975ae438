"""Takes back leases that have run out, once a second, while the service runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime, timedelta
from typing import Final

from starlette.concurrency import run_in_threadpool

from results_db.errors import ResultsDbError
from results_db.part import Clock
from results_db.store import Store

ASLEEP_S: Final = 5.0
"""A sweep that comes this much too late means that the service was asleep (suspended, starved), or
that the clock was set forward: nobody could extend a lease in the time that is missing."""

IDLE_TIME_INTERVAL: Final = timedelta(seconds=5)
"""Between two times that campaigns are charged with what allocations hold for nobody."""

_log = logging.getLogger(__name__)


class Sweeper:
    """Leases do not run out while the service is down or asleep: nobody could extend them then."""

    def __init__(
        self,
        store: Store,
        *,
        lease_s: float,
        interval_s: float,
        clock: Clock | None = None,
    ) -> None:
        """Sweeps by the store's own clock: leases are written in its time.

        A monotonic clock would not do: it stands still while the machine is suspended, and the
        leases run out all the same.

        Where several processes serve one database, each sweeps, and the last sweep is that of any of
        them: the service was away only while all were.
        """
        self._store = store
        self._lease_s = lease_s
        self._interval_s = interval_s
        self._clock = clock or store.now
        self._last_sweep: datetime | None = None
        self._shared_idle_time_at: datetime | None = None

    def sweep(self) -> None:
        """Takes back what has run out.

        The first sweep, and one after a sleep, extends instead; one after the clock was set back gives
        every lease no more than its full time.
        """
        self._store.agree_on_time()
        now = self._clock()
        last_sweep = self._store.swept_at() if self._store.is_shared else self._last_sweep
        if self._was_away(last_sweep, now):
            self._store.extend_leases(lease_s=self._lease_s)
        elif last_sweep is not None and now < last_sweep:
            # The clock was set back: the lease of a worker that is gone would hold until it is then again.
            self._store.cut_leases(lease_s=self._lease_s)
        else:
            for trial_id in self._store.expire_leases():
                _log.warning("the lease of trial %d has run out", trial_id)
        # Only now: a sweep that failed has not happened, and an extension is tried again.
        self._last_sweep = now
        if self._store.is_shared:
            self._store.note_sweep(now)
        if self._is_time_to_share(now):
            self._store.share_idle_time()
            self._shared_idle_time_at = now

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

    def _is_time_to_share(self, now: datetime) -> bool:
        last = self._shared_idle_time_at
        return last is None or abs(now - last) >= IDLE_TIME_INTERVAL

    def _was_away(self, last_sweep: datetime | None, now: datetime) -> bool:
        if last_sweep is None:
            return True
        return (now - last_sweep).total_seconds() > self._interval_s + ASLEEP_S


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

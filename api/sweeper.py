"""Takes back leases that have run out, once a second, while the service runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from starlette.concurrency import run_in_threadpool

from results_db.errors import ResultsDbError
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
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._lease_s = lease_s
        self._interval_s = interval_s
        self._monotonic = monotonic
        self._last_sweep: float | None = None

    def sweep(self) -> None:
        """Takes back what has run out; the first sweep, and one after a sleep, extends instead."""
        now = self._monotonic()
        last, self._last_sweep = self._last_sweep, now
        if last is None or now - last > self._interval_s + ASLEEP_S:
            self._store.extend_leases(lease_s=self._lease_s)
            return
        for trial_id in self._store.expire_leases():
            _log.warning("the lease of trial %d has run out", trial_id)

    async def run(self) -> None:
        """Sweeps until cancelled."""
        while True:
            try:
                await run_in_threadpool(self.sweep)
            except ResultsDbError as error:
                # The next sweep tries again; a service that dies of it would help nobody.
                _log.warning("no lease was taken back: %s", error)
            await asyncio.sleep(self._interval_s)


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

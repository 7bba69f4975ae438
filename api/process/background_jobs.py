"""Background jobs of the service: it ends expired leases every second, and prunes every hour."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Final

from starlette.concurrency import run_in_threadpool

from layout_tuner.api.background_loops import attempt, in_background
from layout_tuner.api.live.database_changes import DatabaseChanges
from layout_tuner.api.settings import Settings
from layout_tuner.protocol.connection.outage_log import OutageLog
from layout_tuner.results_db.database.change_mark import RUNNING_TRIAL
from layout_tuner.results_db.database.store_base import Clock
from layout_tuner.results_db.database.wait_for_server import once_it_answers
from layout_tuner.results_db.retention import Retention
from layout_tuner.results_db.store import Store
from layout_tuner.timing_mark import is_timing

ASLEEP_S: Final = 5.0
"""A sweep that is later than this means that the service was suspended or starved, or that the
clock was set forward. Workers could not extend their leases in that time."""

WHILE_TIMING: Final = timedelta(seconds=4)
"""A sweep is this much later at the most where ranks time iterations on this machine."""

IDLE_TIME_INTERVAL: Final = timedelta(seconds=5)
"""How often the idle time of allocations is charged to campaigns, and quotas are looked at."""

PRUNE_AFTER_S: Final = 300.0
"""Seconds before the first pruning, so that it does not slow down the start."""
PRUNE_EVERY_S: Final = 3600.0

_log: Final = logging.getLogger(__name__)


class Sweeper:
    """Ends expired leases. Leases do not expire while the service is down or suspended."""

    def __init__(
        self,
        store: Store,
        *,
        interval_s: float,
        clock: Clock | None = None,
        changes: DatabaseChanges | None = None,
    ) -> None:
        """Uses the store's clock, in whose time leases are written.

        A monotonic clock stands still while the machine is suspended, and leases expire meanwhile.

        Where several processes serve one database, each sweeps. The last sweep is the latest of all
        processes: the service was down only while all of them were. Without `changes`, every sweep
        asks the store whether any trial runs.
        """
        self._changes = changes
        self._store = store
        self._interval_s = interval_s
        self._clock = clock or store.now
        self._last_sweep: datetime | None = None
        self._shared_idle_time_at: datetime | None = None

    def sweep(self) -> None:
        """Ends expired leases.

        The first sweep, and a sweep after a suspension, extends all leases instead. A sweep after
        the clock was set back shortens every lease to its full time from now.
        """
        self._store.agree_on_time()
        now = self._clock()
        last_sweep = self._store.leases.swept_at() if self._store.is_shared else self._last_sweep
        longest = timedelta(seconds=self._interval_s + ASLEEP_S)
        if last_sweep is None or now - last_sweep > longest:
            self._store.leases.extend()
        elif now < last_sweep:
            # The clock was set back: the lease of a lost worker would last too long.
            self._store.leases.cut()
        else:
            for trial_id in self._store.leases.expire():
                _log.warning("the lease of trial %d has run out", trial_id)
        # After the sweep: if it failed, an extension is tried again.
        self._last_sweep = now
        if self._store.is_shared:
            self._store.leases.note_sweep(now)
        if self._is_time_to_share(now):
            self._store.allocations.share_idle_time()
            self._store.quotas.notify_nearly_used()
            self._shared_idle_time_at = now

    async def run(self) -> None:
        """Sweeps until cancelled."""
        outage = OutageLog(_log, "taking leases back")

        async def sweep() -> None:
            if not self._skip():
                await run_in_threadpool(self.sweep)

        while True:
            await attempt(sweep, outage, "no lease was taken back")
            await asyncio.sleep(self._interval_s)

    def _skip(self) -> bool:
        """Whether there is nothing to do, which is known without a transaction."""
        if self._changes is None or self._last_sweep is None:
            return False
        now = self._clock()
        if now - self._last_sweep < WHILE_TIMING and is_timing():
            return True
        if self._is_time_to_share(now) or self._changes.finds(RUNNING_TRIAL):
            return False
        self._last_sweep = now
        return True

    def _is_time_to_share(self, now: datetime) -> bool:
        last = self._shared_idle_time_at
        return last is None or abs(now - last) >= IDLE_TIME_INTERVAL


@asynccontextmanager
async def sweeping(sweeper: Sweeper) -> AsyncIterator[None]:
    """Sweeps in the background while the block runs."""
    # Leases are extended before the first request is answered.
    await run_in_threadpool(once_it_answers, sweeper.sweep)
    async with in_background(sweeper.run()):
        yield


async def prune(
    store: Store,
    retention: Retention,
    *,
    first_after_s: float = PRUNE_AFTER_S,
    every_s: float = PRUNE_EVERY_S,
) -> None:
    """Deletes old rows again and again, until cancelled."""
    outage = OutageLog(_log, "pruning")

    async def prune_once() -> None:
        pruned = await run_in_threadpool(store.retention.prune, retention)
        if pruned.total:
            _log.info("pruned old rows: %s", pruned)

    await asyncio.sleep(first_after_s)
    while True:
        await attempt(prune_once, outage, "nothing was pruned")
        await asyncio.sleep(every_s)


async def send_messages(store: Store, settings: Settings) -> None:
    """Sends the messages of webhooks until cancelled, where hosts are allowed."""
    if settings.webhook_hosts:
        # Imported where it is used: httpx is slow to import.
        from layout_tuner.api.process.webhook_sender import WebhookSender

        await WebhookSender(store, settings).run()

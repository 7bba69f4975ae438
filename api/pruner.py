"""Lets go of what is old, every hour, while the service runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

from starlette.concurrency import run_in_threadpool

from results_db.errors import ResultsDbError
from results_db.retention import Retention
from results_db.store import Store

FIRST_AFTER_S: Final = 300.0
"""Not while the service starts: there are more urgent things then."""
EVERY_S: Final = 3600.0

_log: Final = logging.getLogger(__name__)


@asynccontextmanager
async def pruning(
    store: Store,
    retention: Retention,
    *,
    first_after_s: float = FIRST_AFTER_S,
    every_s: float = EVERY_S,
) -> AsyncIterator[None]:
    """Prunes in the background while the block runs."""
    task = asyncio.create_task(_prune(store, retention, first_after_s, every_s))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _prune(store: Store, retention: Retention, first_after_s: float, every_s: float) -> None:
    await asyncio.sleep(first_after_s)
    while True:
        try:
            pruned = await run_in_threadpool(store.prune, retention)
        except ResultsDbError as error:
            _log.warning("nothing old was let go of: %s", error)
        except Exception:
            # What is old waits for the next turn; nothing stands on its being gone.
            _log.exception("nothing old was let go of")
        else:
            if pruned.total:
                _log.info("let go of what was old: %s", pruned)
        await asyncio.sleep(every_s)

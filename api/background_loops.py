"""Loops in the background of the service: their turns, their pauses, and their end.

Loops that look for work pause together, so that an idle process wakes up once for all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from layout_tuner.protocol.connection.outage_log import OutageLog

TICK_S: Final = 0.1
"""Seconds between two looks of an idle process."""

_TOO_SHORT: Final = 0.2
"""Part of an interval; a shorter pause would wake up twice for one tick."""


def aligned_pause_s(now_s: float, interval_s: float = TICK_S) -> float:
    """Seconds from now to the next multiple of an interval on the event loop's clock.

    Loops with the same interval, or with multiples of it, wake up at the same moments.
    """
    pause_s = interval_s - now_s % interval_s
    return pause_s if pause_s >= _TOO_SHORT * interval_s else pause_s + interval_s


async def wait_for(event: asyncio.Event, within_s: float | None) -> None:
    """Waits until an event is set, for so many seconds at most; None: without an end."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            await event.wait()


async def attempt(work: Callable[[], Awaitable[None]], outage: OutageLog, problem: str) -> None:
    """Does one turn of a loop. Its failure is logged, and the loop goes on: it tries again."""
    try:
        await work()
    except Exception as error:
        outage.failed(problem, error)
    else:
        outage.worked()


@asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs a coroutine in the background, and cancels it at the end of the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

"""Live events: one reader of the log a process, which hands them to all of its watchers.

A watcher costs no look at the database while nothing happens, and an event is written down as bytes once,
however many watch it. On PostgreSQL the same turn gives new events their numbers (decision 34).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from threading import Event
from typing import Final

from fastapi.sse import format_sse_event
from starlette.concurrency import run_in_threadpool

from api.errors import WatchersTooManyError
from api.schemas import EventRead
from results_db.errors import ResultsDbError
from results_db.event_log import EventRecord
from results_db.store import Store

PAGE: Final = 500
"""Events that are read at once."""

_log = logging.getLogger(__name__)


def event_bytes(event: EventRecord) -> bytes:
    """The event as it goes over the wire."""
    document = EventRead(
        seq=event.seq,
        kind=event.kind,
        at=event.at,
        campaign_id=event.campaign_id,
        trial_id=event.trial_id,
        data=dict(event.data),
    )
    return format_sse_event(
        data_str=document.model_dump_json(), event=event.kind, id=str(event.seq)
    )


class Subscription:
    """What one watcher has not been sent yet."""

    def __init__(self, campaign_id: int | None, after: int, max_waiting: int) -> None:
        self.campaign_id = campaign_id
        """The campaign whose events it hears; None: of all."""
        self._after = after
        self.closed_because = ""
        """Why no more will come; empty: more may."""
        self._waiting: list[bytes] = []
        self._max_waiting = max_waiting
        self._news = asyncio.Event()

    def put(self, seq: int, event: bytes) -> None:
        """Hands it an event, unless it has seen it; one that has too many unread hears no more."""
        if self.closed_because or seq <= self._after:
            return
        if len(self._waiting) >= self._max_waiting:
            self.close(f"{len(self._waiting)} events waited to be read: too slow")
            _log.warning("a watcher of live events is dropped: %s", self.closed_because)
            return
        self._waiting.append(event)
        self._news.set()

    def close(self, why: str) -> None:
        """Ends it; what waits is still sent."""
        self.closed_because = self.closed_because or why
        self._news.set()

    async def next(self, patience_s: float) -> bytes:
        """All that waits, as soon as something does; nothing when that takes too long, or it is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._news.wait()
        waiting, self._waiting = self._waiting, []
        if not self.closed_because:
            self._news.clear()
        return b"".join(waiting)


class EventHub:
    """Reads the log in turns while somebody watches."""

    def __init__(
        self,
        store: Store,
        *,
        stopping: Event,
        interval_s: float,
        idle_interval_s: float,
        max_watchers: int,
        max_waiting: int,
    ) -> None:
        """Made by the service at its start.

        Args:
            store: whose log it is.
            stopping: set when the service ends: every watcher is told.
            interval_s: seconds between turns while somebody watches.
            idle_interval_s: seconds between turns otherwise, which number events for other processes.
            max_watchers: how many may watch at once.
            max_waiting: unread events after which a watcher is dropped.
        """
        self._store = store
        self._stopping = stopping
        self._interval_s = interval_s
        self._idle_interval_s = idle_interval_s
        self._max_watchers = max_watchers
        self._max_waiting = max_waiting
        self._subscriptions: set[Subscription] = set()
        self._num_admitted = 0
        self._handed_out = 0
        self._wanted = asyncio.Event()
        self._starting = asyncio.Lock()

    @property
    def num_watchers(self) -> int:
        """How many watch now, or catch up on what they missed."""
        return self._num_admitted

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Holds a place from a stream's first word to its last: who catches up slowly costs as much.

        Raises:
            WatchersTooManyError: there are too many already.
        """
        if self._num_admitted >= self._max_watchers:
            raise WatchersTooManyError(
                f"{self.num_watchers} watch live events already, which is the most that a process "
                "serves; try again later, or poll the page"
            )
        self._num_admitted += 1
        try:
            yield
        finally:
            self._num_admitted -= 1

    async def position(self) -> int:
        """The number of the last event that was handed out: what a new subscription goes on after."""
        async with self._starting:
            if not self._subscriptions:
                self._handed_out = await run_in_threadpool(self._store.last_event_seq)
            return self._handed_out

    @contextmanager
    def subscribed(self, campaign_id: int | None, after: int) -> Iterator[Subscription]:
        """Watches from `position` on; nothing may be awaited between the two.

        Args:
            campaign_id: whose events; None: those of all campaigns.
            after: the last that the watcher has seen, which is not before the position.
        """
        subscription = Subscription(campaign_id, after, self._max_waiting)
        self._subscriptions.add(subscription)
        self._wanted.set()
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    async def run(self) -> None:
        """Takes turns until cancelled."""
        while True:
            try:
                await self._turn()
            except ResultsDbError as error:
                # Watchers stay: they hear what they missed once the database is back.
                _log.warning("no live event was read: %s", error)
            except Exception:
                _log.exception("no live event was read")
            await self._pause()

    async def _pause(self) -> None:
        if self._subscriptions:
            await asyncio.sleep(self._interval_s)
            return
        self._wanted.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._idle_interval_s):
                await self._wanted.wait()

    async def _turn(self) -> None:
        if self._stopping.is_set():
            for subscription in self._subscriptions:
                subscription.close("the service ends")
        await run_in_threadpool(self._store.number_events)
        while self._subscriptions:
            page = await run_in_threadpool(self._read)
            self._hand_out(page)
            if len(page) < PAGE:
                break

    def _read(self) -> Sequence[tuple[EventRecord, bytes]]:
        events = self._store.events(after=self._handed_out, limit=PAGE)
        return [(event, event_bytes(event)) for event in events]

    def _hand_out(self, page: Sequence[tuple[EventRecord, bytes]]) -> None:
        listeners: dict[int | None, list[Subscription]] = {}
        for subscription in self._subscriptions:
            listeners.setdefault(subscription.campaign_id, []).append(subscription)
        for event, written in page:
            if event.seq <= self._handed_out:
                # Everybody left while the page was read, and somebody came who begins later.
                continue
            for subscription in (*listeners.get(None, ()), *listeners.get(event.campaign_id, ())):
                subscription.put(event.seq, written)
            self._handed_out = event.seq


@asynccontextmanager
async def handing_out(hub: EventHub) -> AsyncIterator[None]:
    """Takes turns in the background while the block runs."""
    task = asyncio.create_task(hub.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

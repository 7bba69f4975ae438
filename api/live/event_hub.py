"""Live events: one reader of the log in each process, which distributes them to all watchers.

A watcher needs no database query of its own, and an event is serialized once for all watchers.
Each gets the events of campaigns that its owner may see when they are distributed: who that is, is
read once for all watchers. On PostgreSQL the same loop gives new events their numbers (decision
34). Once a second the loop also compares the state of trials, workers and nodes with the one
before, and distributes live events (decision 34).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Final

from fastapi.sse import format_sse_event
from pydantic_core import to_json
from starlette.concurrency import run_in_threadpool

from layout_tuner.api.background_loops import attempt, wait_for
from layout_tuner.api.live.database_changes import DatabaseChanges
from layout_tuner.api.live.live_events import LiveEvent, first_events, live_events
from layout_tuner.api.live.open_streams import OpenStreams
from layout_tuner.api.security.authentication import Authentication, Credential
from layout_tuner.api.settings import Settings
from layout_tuner.protocol.connection.outage_log import OutageLog
from layout_tuner.results_db.access.owners_and_groups import Audience
from layout_tuner.results_db.events.live_state import LiveState
from layout_tuner.results_db.records import EventRead
from layout_tuner.results_db.store import Store

PAGE: Final = 500
"""Events that are read in one query."""

_log = logging.getLogger(__name__)


def event_bytes(event: EventRead) -> bytes:
    seq = None if event.seq is None else str(event.seq)
    return format_sse_event(data_str=to_json(event).decode(), event=event.kind, id=seq)


class Subscription:
    """The events that one watcher has not been sent yet."""

    def __init__(
        self, campaign_id: int | None, owner: str | None, after: int, max_waiting: int
    ) -> None:
        self.campaign_id = campaign_id
        """The campaign whose events it gets; None: all campaigns."""
        self.owner = owner
        """The owner of whose campaigns it gets events; None: it sees all."""
        self._after = after
        self.closed_because = ""
        """Why it gets no more events; empty: it is open."""
        self._waiting: list[bytes] = []
        self._max_waiting = max_waiting
        self._news = asyncio.Event()

    def gets(self, event: LiveEvent, audience: Audience) -> bool:
        """Whether a live event is for it."""
        if self.campaign_id not in (None, event.campaign_id):
            return False
        if event.owner is not None and self.owner not in (None, event.owner):
            return False
        return event.campaign_id is None or self.sees(event.campaign_id, audience)

    def sees(self, campaign_id: int, audience: Audience) -> bool:
        return self.owner is None or (self.owner, campaign_id) in audience

    def put(self, seq: int, event: bytes) -> None:
        """Adds an event unless it was sent before; with too many unread events, closes instead."""
        if seq > self._after:
            self.put_live(event)

    def put_live(self, event: bytes) -> None:
        if self.closed_because:
            return
        if len(self._waiting) >= self._max_waiting:
            self.close(f"{len(self._waiting)} events waited to be read: too slow")
            _log.warning("a watcher of live events is dropped: %s", self.closed_because)
            return
        self._waiting.append(event)
        self._news.set()

    def close(self, why: str) -> None:
        """Closes it; waiting events are still sent."""
        self.closed_because = self.closed_because or why
        self._news.set()

    async def next(self, patience_s: float) -> bytes:
        """Waits for events and returns all; nothing after the timeout or if it is closed."""
        await wait_for(self._news, patience_s)
        waiting, self._waiting = self._waiting, []
        if not self.closed_because:
            self._news.clear()
        return b"".join(waiting)


class EventHub:
    """Reads new events in a loop and distributes them to the watchers."""

    def __init__(
        self,
        store: Store,
        changes: DatabaseChanges,
        settings: Settings,
        authentication: Authentication,
    ) -> None:
        self.streams = OpenStreams(authentication, settings.max_watchers)
        self._store = store
        self._changes = changes
        self._settings = settings
        self._changes_read = 0
        self._subscriptions: set[Subscription] = set()
        self._handed_out = 0
        self._live_state: LiveState | None = None
        """The state of the last live events; None: nobody watches."""
        self._live_state_at_s = 0.0
        self._wanted = asyncio.Event()
        self._starting = asyncio.Lock()

    @contextmanager
    def admitted(self, credential: Credential) -> Iterator[asyncio.Future[str]]:
        """Counts a watcher, as `OpenStreams.admitted`, from the beginning of its stream on."""
        try:
            with self.streams.admitted(credential) as ended:
                yield ended
        finally:
            if not self.streams:
                self._live_state = None

    async def position(self) -> int:
        """The number of the last distributed event; a new subscription continues after it."""
        async with self._starting:
            if not self._subscriptions:
                self._handed_out = await run_in_threadpool(self._store.events.last_seq)
            return self._handed_out

    async def live_state(self) -> LiveState:
        """The state with which the next live events are compared; for admitted watchers."""
        async with self._starting:
            if self._live_state is None:
                self._live_state = await run_in_threadpool(self._store.live.state)
                self._live_state_at_s = time.monotonic()
            return self._live_state

    @contextmanager
    def subscribed(
        self,
        campaign_id: int | None,
        owner: str | None,
        after: int,
        opened: LiveState,
        audience: Audience,
    ) -> Iterator[Subscription]:
        """A subscription from `position` on; nothing may be awaited between the two calls.

        The watcher has the events up to `after`, and the state `opened` of the beginning of its
        stream, with the `audience` of then.
        """
        subscription = Subscription(campaign_id, owner, after, self._settings.max_waiting_events)
        self._subscriptions.add(subscription)
        assert self._live_state is not None  # the watcher is admitted, and has read it
        for event in first_events(opened, self._live_state, self._store.now(), campaign_id):
            if subscription.gets(event, audience):
                subscription.put_live(event.content)
        self._wanted.set()
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    async def run(self) -> None:
        """Reads and distributes events until cancelled."""
        outage = OutageLog(_log, "reading live events")
        while True:
            # During an outage watchers stay connected, and get the missed events after it.
            await attempt(self._turn, outage, "no live event was read")
            await self._pause()

    async def _pause(self) -> None:
        if self._subscriptions:
            await self._changes.after(
                self._changes_read,
                within_s=self._settings.live_event_s,
                pause_s=self._settings.event_poll_s,
            )
            return
        self._wanted.clear()
        idle_s = None if self._changes.can_tell else self._settings.event_idle_poll_s
        await wait_for(self._wanted, idle_s)

    async def _turn(self) -> None:
        if self._settings.stopping.is_set():
            for subscription in self._subscriptions:
                subscription.close("the service ends")
        self._changes_read = self._changes.number
        await run_in_threadpool(self._store.events.number)
        while self._subscriptions:
            page = await run_in_threadpool(self._read)
            audience = await self._audience({event.campaign_id for event, _ in page})
            self._hand_out(page, audience)
            if len(page) < PAGE:
                break
        if (
            self._subscriptions
            and time.monotonic() - self._live_state_at_s >= self._settings.live_event_s
        ):
            await self._compare_states()

    async def _compare_states(self) -> None:
        """Distributes what has changed since the last comparison."""
        async with self._starting:
            before = self._live_state
            if before is None:
                return  # all watchers have left
            self._live_state_at_s = time.monotonic()
            now, events = await run_in_threadpool(self._read_live, before)
            if self._live_state is None:
                return
            self._live_state = now
        audience = await self._audience({event.campaign_id for event in events})
        for event in events:
            for subscription in self._subscriptions:
                if subscription.gets(event, audience):
                    subscription.put_live(event.content)

    async def _audience(self, of: Set[int | None]) -> Audience:
        """Which of the watchers' owners may see which campaigns, read once for all watchers."""
        campaign_ids = {id_ for id_ in of if id_ is not None}
        audience: Audience = frozenset()
        known = set[str]()
        while campaign_ids and not known.issuperset(self._owners()):  # a watcher may come meanwhile
            known = self._owners()
            audience = await run_in_threadpool(self._store.owners.audience, known, campaign_ids)
        return audience

    def _owners(self) -> set[str]:
        return {each.owner for each in self._subscriptions if each.owner is not None}

    def _read_live(self, before: LiveState) -> tuple[LiveState, list[LiveEvent]]:
        now = self._store.live.state(before)
        return now, live_events(before, now, self._store.now())

    def _read(self) -> Sequence[tuple[EventRead, bytes]]:
        events = self._store.events.find(after=self._handed_out, limit=PAGE)
        return [(event, event_bytes(event)) for event in events]

    def _hand_out(self, page: Sequence[tuple[EventRead, bytes]], audience: Audience) -> None:
        listeners: dict[int | None, list[Subscription]] = {}
        for subscription in self._subscriptions:
            listeners.setdefault(subscription.campaign_id, []).append(subscription)
        for event, written in page:
            assert event.seq is not None, "it is stored"
            if event.seq <= self._handed_out:
                # During the read all watchers left, and a new one came that begins later.
                continue
            for subscription in (*listeners.get(None, ()), *listeners.get(event.campaign_id, ())):
                if subscription.sees(event.campaign_id, audience):
                    subscription.put(event.seq, written)
            self._handed_out = event.seq

"""The event stream of one watcher: first the missed events, then the live ones."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Final

from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from layout_tuner.api.live.event_hub import PAGE, EventHub, Subscription, event_bytes
from layout_tuner.api.live.open_streams import CLOSING_S
from layout_tuner.api.settings import Settings
from layout_tuner.results_db.access.owners_and_groups import Audience
from layout_tuner.results_db.errors import ResultsDbError
from layout_tuner.results_db.events.live_state import LiveState
from layout_tuner.results_db.store import Store

OPENED: Final = "stream.opened"
CLOSED: Final = "stream.closed"
RETRY_MS: Final = 1000
"""Milliseconds after which a client that lost the stream reconnects."""

_log = logging.getLogger(__name__)


class EventStream(Response):
    """The response to a watcher, of events that are serialized once for all watchers.

    FastAPI's `EventSourceResponse` would validate and serialize every event for every watcher, and
    run two tasks with two queues for each.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        hub: EventHub,
        store: Store,
        settings: Settings,
        *,
        campaign_id: int | None,
        after: int | None,
    ) -> None:
        """Without `campaign_id` it is of all that the store sees; without `after` it begins now."""
        # The second header tells proxies not to buffer events.
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._hub, self._store, self._settings = hub, store, settings
        self._campaign_id, self._after = campaign_id, after
        self._opened = LiveState()
        self._audience: Audience = frozenset()
        self._end: int | None = None
        """The number of the last event of a campaign that has ended; None: more may come."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Streams until the client disconnects or the service ends the stream."""
        with self._hub.admitted(scope["state"]["credential"]) as ended:
            await self._stream(receive, send, ended)
        # A client that reads nothing does not hold a place any more.
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _stream(self, receive: Receive, send: Send, ended: asyncio.Future[str]) -> None:
        missed = await self._resume()
        if self._campaign_id is not None:  # after the position, so that an end between is not lost
            self._end = await run_in_threadpool(self._store.events.end, self._campaign_id)
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        sending = asyncio.ensure_future(self._send_all(send, missed=missed))
        hanging_up = asyncio.ensure_future(_hung_up(receive))
        try:
            await asyncio.wait((sending, hanging_up, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            hanging_up.cancel()
            done = await asyncio.gather(sending, hanging_up, return_exceptions=True)
        for error in done:
            if isinstance(error, Exception):
                raise error
        if ended.done():
            await self._close(send, ended.result())

    async def _resume(self) -> bool:
        """Sets the position where the stream begins; True: missed events were deleted."""
        self._opened = await self._hub.live_state()
        if (owner := self._store.eyes_of) is not None:
            audience = self._store.owners.audience
            self._audience = await run_in_threadpool(audience, [owner], self._opened.campaigns)
        position = await self._hub.position()
        if self._after is None:
            self._after = position
            return False
        last = await run_in_threadpool(self._store.events.last_seq)
        if self._after > last:
            # The number is from another database, or from this one before a restore.
            self._after = last
            return True
        return self._after < await run_in_threadpool(self._store.events.pruned_seq)

    async def _close(self, send: Send, reason: str) -> None:
        chunk = _control(CLOSED, {"reason": reason})
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSING_S):
                await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _send_all(self, send: Send, *, missed: bool) -> None:
        async for chunk in self._chunks(missed=missed):
            try:
                async with asyncio.timeout(self._settings.event_send_s):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except TimeoutError:
                # The client reads nothing, so the connection is closed without a last event.
                _log.warning(
                    "a watcher of live events is dropped: it read nothing for %g s",
                    self._settings.event_send_s,
                )
                return

    async def _chunks(self, *, missed: bool) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._settings.event_stream_s
        assert self._after is not None  # `_resume` has set it
        after = self._after
        opened = {"after": after, "missed": missed}
        opened |= {} if self._end is None else {"end": self._end}
        yield _control(OPENED, opened, seq=after, retry=RETRY_MS)
        try:
            while after < (position := await self._hub.position()):
                page = await run_in_threadpool(
                    self._store.events.find, after=after, campaign_id=self._campaign_id, limit=PAGE
                )
                if page:
                    yield b"".join(event_bytes(event) for event in page)
                    after = page[-1].seq or after
                if len(page) < PAGE:
                    # These were all events up to the position.
                    after = max(after, position)
        except ResultsDbError as error:
            yield _control(CLOSED, {"reason": f"what was missed cannot be read: {error}"})
            return
        with self._hub.subscribed(
            self._campaign_id, self._store.eyes_of, after, self._opened, self._audience
        ) as subscription:
            async for chunk in self._live(subscription, until_s):
                yield chunk

    async def _live(self, subscription: Subscription, until_s: float) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        while not subscription.closed_because:
            left_s = until_s - loop.time()
            if left_s <= 0:
                subscription.close("the longest time of a stream is over: come again")
            chunk = await subscription.next(min(self._settings.event_ping_s, max(left_s, 0.0)))
            if chunk:
                yield chunk
            elif not subscription.closed_because:
                yield KEEPALIVE_COMMENT
        yield _control(CLOSED, {"reason": subscription.closed_because})


def _control(
    event: str, data: dict[str, Any], *, seq: int | None = None, retry: int | None = None
) -> bytes:
    """An event about the stream itself."""
    return format_sse_event(
        data_str=json.dumps(data), event=event, id=None if seq is None else str(seq), retry=retry
    )


async def _hung_up(receive: Receive) -> None:
    """Waits until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass

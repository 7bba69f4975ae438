"""Streams of events, followed: taken up again where they were lost, for as long as somebody asks for more."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from httpx_sse import EventSource, ServerSentEvent
from pydantic import ValidationError

from api.client.call import Call, reader_of
from api.client.sending import AsyncSender, Connection, SyncSender, refusal
from api.errors import EventsMissedError, ServiceError
from api.schemas import EventRead

_OPENED = "stream.opened"
_CLOSED = "stream.closed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Events that are followed."""

    path: str
    """From the root of the service."""
    after: int | None = None
    """The last event that is known; 0: none, from the first that is kept; None: what comes from now on."""


@dataclass(kw_only=True, slots=True)
class _Place:
    """How far a stream was heard, over all of its connections."""

    stream: Stream
    connection: Connection
    last: str = ""
    """The number of the last event; empty: none was heard yet."""
    attempt: int = 0
    """How often in a row it was asked for in vain."""
    asked_at: float = 0.0
    """When it was asked for last, by the monotonic clock."""
    was_heard: bool = False
    """Whether an event has come since then, or the service's word that it ends the stream."""
    ended_at_once: int = 0
    """How often in a row it ended as soon as it began, without such a word."""
    call: Call[EventRead] = field(init=False)

    def __post_init__(self) -> None:
        if self.stream.after is not None:
            self.last = str(self.stream.after)
        self.call = Call(
            method="GET", path=self.stream.path, read=reader_of(EventRead), is_repeatable=True
        )

    def request(self) -> Mapping[str, Any]:
        """The request that goes on from here."""
        self.attempt += 1
        self.asked_at, self.was_heard = time.monotonic(), False
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        after = {} if self.stream.after is None else {"after": self.stream.after}
        return {
            "method": "GET",
            "url": self.stream.path,
            "params": after,
            "headers": headers | ({"Last-Event-ID": self.last} if self.last else {}),
        }

    def read(self, said: ServerSentEvent) -> EventRead | None:
        """The event, where it is one; what the stream says of itself is kept here."""
        self.was_heard |= said.event != _OPENED
        if said.event == _CLOSED or not said.data:
            return None
        self.attempt = 0
        self.last = said.id
        if said.event == _OPENED:
            if json.loads(said.data)["missed"]:
                raise EventsMissedError(
                    f"events after {said.id} are kept no more: read anew what you follow"
                )
            return None
        try:
            return EventRead.model_validate_json(said.data)
        except ValidationError as error:
            raise ServiceError(
                f"{self.connection.url} sent an event that this version does not understand; are "
                "client and service of the same version?"
            ) from error

    def pause_after_answer(self, response: httpx.Response) -> float:
        """Seconds until it is asked for again.

        Raises:
            ServiceError: the service refuses.
        """
        pause_s = self.connection.retries.pause_after_answer(self.call, self.attempt, response)
        if pause_s is None:
            raise refusal(response)
        return pause_s

    def pause_after_end(self) -> float:
        """Seconds until it is asked for again.

        Raises:
            ServiceError: it ended as soon as it began, often enough.
        """
        retries = self.connection.retries
        if self.was_heard or time.monotonic() - self.asked_at > retries.longest_pause_s:
            self.ended_at_once = 0
            return retries.first_pause_s
        self.ended_at_once += 1
        pause_s = retries.pause_after_end(self.ended_at_once)
        if pause_s is None:
            raise ServiceError(
                f"the live events of {self.connection.url} end as soon as they begin, "
                f"{self.ended_at_once} times now; is that a service, and does a proxy before it let streams "
                "through?"
            )
        return pause_s

    def pause_after_error(self, error: httpx.TransportError) -> float:
        """Seconds until it is asked for again.

        Raises:
            ServiceError: it was asked for in vain often enough.
        """
        # One that was open a moment ago is asked for as often as any other.
        attempt = max(self.attempt, 1)
        pause_s = self.connection.retries.pause_after_error(self.call, attempt, error)
        if pause_s is None:
            self.connection.unanswered(error)
        return pause_s


class SyncFollower(SyncSender):
    """Follows streams one at a time."""

    def follow(self, stream: Stream) -> Iterator[EventRead]:
        """Every event of a stream, each once; waits for the next.

        Raises:
            ServiceError: the service refuses, or answers no more.
        """
        place = _Place(stream=stream, connection=self._connection)
        while True:
            pause_s = 0.0
            try:
                with self._http.stream(**place.request()) as response:
                    if response.is_success:
                        for said in EventSource(response).iter_sse():
                            if (event := place.read(said)) is not None:
                                yield event
                        pause_s = place.pause_after_end()
                    else:
                        response.read()
                        pause_s = place.pause_after_answer(response)
            except httpx.TransportError as error:
                pause_s = place.pause_after_error(error)
            time.sleep(pause_s)


class AsyncFollower(AsyncSender):
    """Follows streams beside others, in an event loop of asyncio."""

    async def follow(self, stream: Stream) -> AsyncIterator[EventRead]:
        """Every event of a stream, each once; waits for the next.

        Raises:
            ServiceError: the service refuses, or answers no more.
        """
        place = _Place(stream=stream, connection=self._connection)
        while True:
            pause_s = 0.0
            try:
                async with self._http.stream(**place.request()) as response:
                    if response.is_success:
                        async for said in EventSource(response).aiter_sse():
                            if (event := place.read(said)) is not None:
                                yield event
                        pause_s = place.pause_after_end()
                    else:
                        await response.aread()
                        pause_s = place.pause_after_answer(response)
            except httpx.TransportError as error:
                pause_s = place.pause_after_error(error)
            await asyncio.sleep(pause_s)

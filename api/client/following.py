"""How event streams are followed: a lost stream is opened again after the last event received."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from httpx_sse import EventSource, ServerSentEvent
from pydantic import ValidationError

from api.client.call import Call, Stream, get
from api.client.sending import Connection, Sender
from api.errors import EventsMissedError, ServiceError
from api.schemas.campaigns_and_trials import EventRead

_OPENED = "stream.opened"
_CLOSED = "stream.closed"


@dataclass(kw_only=True, slots=True)
class _Place:
    """The position in a stream, over all of its connections."""

    stream: Stream
    connection: Connection
    last: str = ""
    """The number of the last event; empty: none was received yet."""
    attempt: int = 0
    """Failed attempts in a row to open the stream."""
    opened_at: float = 0.0
    """When the last attempt began, by the monotonic clock."""
    was_useful: bool = False
    """Whether the last attempt received an event, or a message that the service ends the stream."""
    ended_at_once: int = 0
    """Attempts in a row that ended at once without such a message."""
    call: Call[EventRead] = field(init=False)

    def __post_init__(self) -> None:
        if self.stream.after is not None:
            self.last = str(self.stream.after)
        self.call = get(self.stream.path, EventRead)

    def request(self) -> Mapping[str, Any]:
        """The request that continues after the last event."""
        self.attempt += 1
        self.opened_at, self.was_useful = time.monotonic(), False
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        after = {} if self.stream.after is None else {"after": self.stream.after}
        return {
            "method": "GET",
            "url": self.call.path,
            "params": after,
            "headers": headers | ({"Last-Event-ID": self.last} if self.last else {}),
        }

    def read(self, said: ServerSentEvent) -> EventRead | None:
        """The event; None for a message about the stream itself, which is noted here."""
        self.was_useful |= said.event != _OPENED
        if said.event == _CLOSED or not said.data:
            return None
        self.attempt = 0
        self.last = said.id
        if said.event == _OPENED:
            if json.loads(said.data)["missed"]:
                raise EventsMissedError(
                    f"events after {said.id} are no longer stored: read again what you follow"
                )
            return None
        try:
            return EventRead.model_validate_json(said.data)
        except ValidationError as error:
            raise ServiceError(
                f"{self.connection.url} sent an event that this version does not understand; are "
                "client and service of the same version?"
            ) from error

    def pause_after_refusal(self, response: httpx.Response) -> float:
        """Seconds until the stream is opened again.

        Raises:
            ServiceError: the service refuses.
        """
        return self.connection.pause_after_refusal(self.call, self.attempt, response)

    def pause_after_end(self) -> float:
        """Seconds until the stream is opened again.

        Raises:
            ServiceError: the stream ended at once too often.
        """
        retries = self.connection.retries
        if self.was_useful or time.monotonic() - self.opened_at > retries.longest_pause_s:
            self.ended_at_once = 0
            return retries.first_pause_s
        self.ended_at_once += 1
        pause_s = retries.pause_s(self.ended_at_once)
        if pause_s is None:
            raise ServiceError(
                f"the live events of {self.connection.url} end as soon as they begin, "
                f"{self.ended_at_once} times now; is that a service, and does a proxy before it "
                "let streams through?"
            )
        return pause_s

    def pause_after_error(self, error: httpx.TransportError) -> float:
        """Seconds until the stream is opened again.

        Raises:
            ServiceError: it could not be opened too often.
        """
        # A stream that was open until now gets as many attempts as a new one.
        return self.connection.pause_after_error(self.call, max(self.attempt, 1), error)


class Follower(Sender):
    """Follows streams one at a time."""

    def follow(self, stream: Stream) -> Iterator[EventRead]:
        """Every event of a stream, each once; waits for the next.

        Raises:
            ServiceError: the service refuses or does not answer any more.
        """
        place = _Place(stream=stream, connection=self._connection)
        while True:
            try:
                with self._http.stream(**place.request()) as response:
                    if response.is_success:
                        for said in EventSource(response).iter_sse():
                            if (event := place.read(said)) is not None:
                                yield event
                        pause_s = place.pause_after_end()
                    else:
                        response.read()
                        pause_s = place.pause_after_refusal(response)
            except httpx.TransportError as error:
                pause_s = place.pause_after_error(error)
            time.sleep(pause_s)

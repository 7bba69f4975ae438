"""How event streams are followed: a lost stream is opened again after the last event received."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress

import httpx
from httpx_sse import EventSource, ServerSentEvent
from pydantic import ValidationError

from api.client.calls import Calls, refusal, unanswered
from api.errors import EventsMissedError, ServiceError
from api.schemas.campaigns_and_trials import EventRead
from search_spaces.errors import ServiceUnansweredError

_OPENED = "stream.opened"
_CLOSED = "stream.closed"


class Follower(Calls):
    """Follows streams one at a time."""

    def _follow(self, path: str, after: int | None) -> Iterator[EventRead]:
        """Every event of a stream, each once; waits for the next.

        It begins after the event `after`; 0: with the first that is kept; None: now.

        Raises:
            ServiceError: the service refuses or does not answer any more.
        """
        retries, url = self._connection.retries, self._connection.url
        last = "" if after is None else str(after)
        ended_at_once = 0
        while True:
            opened_at, was_useful = time.monotonic(), False
            for said in self._said(path, after, last):
                # An event, or the service's own word that it ends the stream.
                was_useful |= said.event != _OPENED
                if said.event == _CLOSED or not said.data:
                    continue
                last = said.id
                if said.event != _OPENED:
                    yield _event(url, said.data)
                elif json.loads(said.data)["missed"]:
                    raise EventsMissedError(
                        f"events after {last} are no longer stored: read again what you follow"
                    )
            if was_useful or time.monotonic() - opened_at > retries.longest_pause_s:
                ended_at_once = 0
            else:
                ended_at_once += 1
            if ended_at_once >= retries.attempts:
                raise ServiceError(
                    f"the live events of {url} end as soon as they begin, {ended_at_once} times now; "
                    "is that a service, and does a proxy before it let streams through?"
                )
            time.sleep(retries.pause_s(max(ended_at_once, 1)))

    def _said(self, path: str, after: int | None, last: str) -> Iterator[ServerSentEvent]:
        """What the service sends until the stream is lost."""
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if last:
            headers["Last-Event-ID"] = last
        query = {} if after is None else {"after": after}
        try:
            with self._connection.stream(f"/v1{path}", params=query, headers=headers) as answer:
                if not answer.is_success:
                    raise refusal(answer)
                with suppress(httpx.TransportError):
                    yield from EventSource(answer).iter_sse()
        except ServiceUnansweredError as error:
            raise unanswered(error) from error


def _event(url: str, data: str) -> EventRead:
    try:
        return EventRead.model_validate_json(data)
    except ValidationError as error:
        raise ServiceError(
            f"{url} sent an event that this version does not understand; are client and "
            "service of the same version?"
        ) from error

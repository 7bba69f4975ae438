"""Requests of the client, their answers as documents, and streams of events.

When a request is sent again, and after which pause, is in
`layout_tuner/protocol/connection/http_connection.py`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from typing import Any, Final, Protocol, TypeVar
from urllib.parse import quote

import httpx
from httpx_sse import EventSource, ServerSentEvent
from pydantic import TypeAdapter, ValidationError
from tenacity import Retrying, retry_if_exception, stop_after_delay

from layout_tuner.api.schemas.campaigns_and_trials import Problem
from layout_tuner.client.errors import EventsMissedError, ServiceError
from layout_tuner.documents.json_values import json_value
from layout_tuner.errors import ServiceUnansweredError, TokenFileUnusableError
from layout_tuner.protocol.connection.http_connection import ServiceConnection, error_of_handler
from layout_tuner.results_db.records import EventRead

PAGE: Final = 200
"""Items of a list that are requested at once."""

IDEMPOTENCY_KEY: Final = "Idempotency-Key"
"""Header by which the service recognizes a request that it has answered before."""

_OPENED: Final = "stream.opened"
_CLOSED: Final = "stream.closed"
_ENDED: Final = "campaign.ended"
_NO_EVENT: Final = "sent an event that this version does not understand"

Document = TypeVar("Document")
"""A class that pydantic validates: a model or a dataclass."""
Item = TypeVar("Item")


class Page(Protocol):
    """A part of a list."""

    @property
    def next_cursor(self) -> str | None:
        """Where the next page begins; None on the last."""


SomePage = TypeVar("SomePage", bound=Page)


class Calls:
    """The base of the client's methods; all raise `ServiceError`.

    Parameters of a query that are None are left out; for a list the name is repeated.
    """

    _connection: ServiceConnection
    _patience_s: float

    def _send(
        self, method: str, path: str, *, query: Mapping[str, Any] | None = None, **request: Any
    ) -> httpx.Response:
        """The answer to a request that the service accepted.

        The path is from the root of the service; `request` is for `ServiceConnection.request`. JSON
        may have values that `json_value` converts.
        """
        params = {name: value for name, value in (query or {}).items() if value is not None}
        if "json" in request:
            request["json"] = json_value(request["json"])
        try:
            answer = self._connection.request(method, path, params=params, **request)
        except ServiceUnansweredError as error:
            raise unanswered(error) from error
        except TokenFileUnusableError as error:
            raise ServiceError(str(error)) from error
        if not answer.is_success:
            raise refusal(answer)
        return answer

    def _read(self, answer: httpx.Response, kind: type[Document]) -> Document:
        """An answer as a document of the service."""
        what = "answered what this version does not understand ({} fields)"
        return self._understood(answer.content, kind, what)

    def _understood(self, content: bytes | str, kind: type[Document], what: str) -> Document:
        """JSON as a document; `what` is the error for other JSON, {} the number of wrong fields."""
        hashable: Any = kind  # mypy does not accept every class as hashable
        validator: TypeAdapter[Document] = _validator_of(hashable)
        try:
            return validator.validate_json(content)
        except ValidationError as error:
            raise ServiceError(
                f"{self._connection.url} {what.format(error.error_count())}; are client and service "
                "of the same version?"
            ) from error

    def _get(self, path: str, kind: type[Document], /, **query: Any) -> Document:
        return self._read(self._get_file(path, **query), kind)

    def _get_file(self, path: str, /, **query: Any) -> httpx.Response:
        return self._send("GET", f"/v1{path}", query=query, is_repeatable=True)

    def _post(
        self,
        path: str,
        kind: type[Document],
        json: Any = None,
        *,
        key: str | None = None,
        query: Mapping[str, Any] | None = None,
    ) -> Document:
        """Requests a change; it is sent again only with an idempotency key."""
        headers = {} if key is None else {IDEMPOTENCY_KEY: key}
        sent: dict[str, Any] = {"json": json, "headers": headers, "query": query}
        answer = self._send("POST", f"/v1{path}", is_repeatable=key is not None, **sent)
        return self._read(answer, kind)

    def _put(self, path: str, kind: type[Document], json: Any) -> Document:
        return self._read(self._send("PUT", f"/v1{path}", json=json, is_repeatable=True), kind)

    def _patch(self, path: str, kind: type[Document], json: Any) -> Document:
        """Changes some fields of a document; it is not sent again."""
        return self._read(self._send("PATCH", f"/v1{path}", json=json), kind)

    def _delete(self, path: str) -> None:
        """Deletes something; it is not sent again, since the second request would get a 404."""
        self._send("DELETE", f"/v1{path}")

    def _walk(
        self,
        page_at: Callable[[str | None], SomePage],
        items_of: Callable[[SomePage], Sequence[Item]],
    ) -> Iterator[Item]:
        """All items of a list; the next page is requested when its first item is."""
        cursor: str | None = None
        while True:
            page = page_at(cursor)
            yield from items_of(page)
            cursor = page.next_cursor
            if cursor is None:
                return

    def _patiently(self, ask: Callable[[], Item], most_s: float = math.inf) -> Item:
        """Calls `ask` again while the service is away, for example while it is restarted.

        It may be away for the patience of the client, and for at most `most_s`.
        """
        again = Retrying(
            retry=retry_if_exception(lambda e: isinstance(e, ServiceError) and e.is_temporary),
            stop=stop_after_delay(min(self._patience_s, most_s)),
            wait=lambda failed: self._connection.retries.pause_s(failed.attempt_number),
            reraise=True,
        )
        return again(ask)

    def _follow(self, path: str, after: int | None, *, to_end: bool) -> Iterator[EventRead]:
        """Every event of a stream, each once; waits for the next.

        It begins after the event `after`; 0: with the first that is kept; None: now. With `to_end`
        it returns after the last event of a campaign that has ended.

        Raises:
            EventsMissedError: events after the given one were deleted.
            ServiceError: the service refuses, or has been away for longer than the patience.
        """
        retries, url = self._connection.retries, self._connection.url
        last = "" if after is None else str(after)
        ended_at_once, was_open, end = 0, False, None
        while True:
            opened_at, was_useful = time.monotonic(), False
            with closing(self._messages(path, after, last, is_patient=was_open)) as stream:
                for message in stream:
                    # An event, or the message of the service that it ends the stream.
                    was_useful |= message.event != _OPENED
                    if message.event == _CLOSED or not message.data:
                        continue
                    before, last, was_open = last, message.id, True
                    if message.event == _OPENED:
                        end = _end_of_stream(message.data, before)
                    else:
                        yield self._understood(message.data, EventRead, _NO_EVENT)
                    if end is not None and int(last) >= end:
                        return
                    if to_end and end is None and message.event == _ENDED:
                        break  # events may follow; the next stream states the last one
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

    def _messages(
        self, path: str, after: int | None, last: str, *, is_patient: bool
    ) -> Generator[ServerSentEvent, None, None]:
        """The messages of a stream until it is lost; `is_patient`: waits for an absent service."""
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if last:
            headers["Last-Event-ID"] = last
        asked: dict[str, Any] = {"query": {"after": after}, "headers": headers, "is_stream": True}

        def opened() -> httpx.Response:
            return self._send("GET", f"/v1{path}", is_repeatable=True, **asked)

        with closing(self._patiently(opened) if is_patient else opened()) as answer:
            try:
                yield from EventSource(answer).iter_sse()
            except httpx.TransportError as error:
                if (raised := error_of_handler(error)) is not None:
                    raise raised from None


def _end_of_stream(data: str, last: str) -> int | None:
    """The number of a campaign's last event, as a stream says when it opens; None: more may come.

    Raises EventsMissedError if events after the event `last` were deleted; 0 means none.
    """
    opened = json.loads(data)
    if opened["missed"] and last != "0":
        raise EventsMissedError(
            f"events after {last} are no longer stored: read again what you follow"
        )
    end: int | None = opened.get("end")
    return end


def unanswered(error: ServiceUnansweredError) -> ServiceError:
    """The error of a request without an answer."""
    hint = "; is it running? `layout-tuner up` starts one" if error.may_be_down else ""
    return ServiceError(f"{error}{hint}")


def refusal(answer: httpx.Response) -> ServiceError:
    """Why the service refused, in the words of its problem document where it sent one."""
    try:
        problem = Problem.model_validate_json(answer.content)
    except ValidationError:
        words = f"the service answered {answer.status_code} {answer.reason_phrase}"
        return ServiceError(words.rstrip(), status=answer.status_code)
    return ServiceError(problem.detail, status=answer.status_code, problem=problem)


@cache
def _validator_of(answer: Any) -> TypeAdapter[Any]:
    """Built once per class: building takes much longer than validating an answer."""
    return TypeAdapter(answer)


def segment(name: str | int) -> str:
    """A name as one segment of a path, with any characters in it quoted."""
    return quote(str(name), safe="")

"""HTTP/1.1 on one connection, with limits on the size and the time of requests.

uvicorn's protocol reads requests and answers them, one after the other. Its parser calls a method
for each part of a request. When the headers are complete, uvicorn makes a *cycle*: the request, its
answer, and the task of the application that answers. A client may send further requests before the
first is answered; their cycles wait in `pipeline`. `self.cycle` is the newest one: the request that
is being read, or was read last.

What is added here: uvicorn does not limit the headers, and its parser joins the parts of a header
again with each new part, so that the time grows with the square of the header's size. A client may
also send a request, or read an answer, as slowly as it likes.

- **Sizes** are counted where the parser calls. A request that is too large is refused there.
- **Times**: `_awaited` is what the client has to send next, and `_since` the moment from which it
  has time for it. The server calls `check` once a second. The time for reading an answer is counted
  besides, by `_unread_since`.
- **The end**: once `_is_ending` is set, nothing more is parsed. The connection is closed when what
  can still be answered has been (`_refuse` lists the cases).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from layout_tuner.api.http.connection_limits import Connections
from layout_tuner.api.http.error_responses import problem_response
from layout_tuner.units import memory

_PARSED_AT_ONCE: Final = 16 << 10
"""Bytes that the parser gets between two checks of its progress."""


class _Awaited(Enum):
    """What the client has to send next."""

    HEADERS = auto()
    """A request line and its headers; on a new connection, also the first byte of them."""
    BODY = auto()
    """The rest of the body of a request that is being answered, or waits for that."""
    REST = auto()
    """The same, where the answer is complete: for example a refusal of the body."""
    NOTHING = auto()
    """It waits for an answer, or may begin another request: uvicorn limits how long it may idle."""


class _RequestRefusedError(Exception):
    """Raised in a call of the parser: it ends the parsing, and the request is refused."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


class _PipelineFullError(Exception):
    """Raised likewise, because too many requests wait: the earlier ones are answered."""


class LimitedProtocol(HttpToolsProtocol):
    """Refuses headers that are too large, and closes connections whose clients are too slow."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        connections: Connections,
        on_lost: Callable[[], None],
    ) -> None:
        """The limits are those of `connections`, which logs refusals."""
        super().__init__(config, server_state, app_state)
        self._connections, self._limits, self._on_lost = connections, connections.limits, on_lost
        self._idle_since = self._since = self.loop.time()
        self._awaited = _Awaited.HEADERS
        self._has_begun = False
        """Whether a request line has begun whose headers are incomplete; empty lines are none."""
        self._is_ending = False
        self._running: RequestResponseCycle = None  # type: ignore[assignment]
        """The cycle that the application works at: with a pipeline, an older one than `cycle`."""
        # Of the request that is being read.
        self._num_url_bytes = self._num_header_bytes = self._num_headers = self._num_body_bytes = 0
        self._num_pending = 0
        """Bytes since the parser last completed the headers, a part of a body, or a request. They
        may be a header, or the line before a part of a body, and have the limit of the headers."""
        self._unread_since: float | None = None
        """When the write buffer became full, or was last read from; None: it is not full."""
        self._num_unread = 0
        """Bytes in the full write buffer, when it was last looked at."""
        self._closing_since: float | None = None

    # Called by the server

    @property
    def idle_since(self) -> float | None:
        """When the service began to wait for the client; None: a request is being answered."""
        is_unread = self.flow is not None and self.flow.write_paused
        return self._idle_since if self._is_all_answered or is_unread else None

    def check(self, now: float, elapsed_s: float) -> None:
        """Closes the connection if its client is too slow."""
        if self.transport.is_closing():
            self._closing_since = now if self._closing_since is None else self._closing_since
            if now - self._closing_since > self._limits.unread_s:
                self.transport.abort()  # the client does not read the rest
        elif self._client_reads_nothing(now):
            self._connections.note("a client did not read its answer; its connection was closed")
            self.transport.abort()
        elif self._is_ending or self._awaited is _Awaited.NOTHING:
            pass
        elif self.flow.read_paused:
            self._since += elapsed_s  # the service does not read at present, so nothing can come
        elif self._awaited is _Awaited.HEADERS:
            if now - self._since > self._limits.header_s:
                self._end_slow_headers()
        else:
            self._check_body(now)

    # Called by the transport

    def data_received(self, data: bytes) -> None:
        """Parses the received bytes in parts."""
        self._unset_keepalive_if_required()
        if self._awaited is _Awaited.NOTHING:
            self._await(_Awaited.HEADERS)
        parts = memoryview(data)
        for start in range(0, len(data), _PARSED_AT_ONCE):
            # The connection was closed or refused: the rest is dropped.
            if self._is_ending or self.parser is None:
                return
            self._parse(parts[start : start + _PARSED_AT_ONCE])

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        self._on_lost()

    def pause_writing(self) -> None:
        """The write buffer is full: the client reads too slowly."""
        self._unread_since = self._idle_since = self.loop.time()
        self._num_unread = self.transport.get_write_buffer_size()
        super().pause_writing()

    def resume_writing(self) -> None:
        """The client has read enough of the write buffer."""
        self._unread_since = None
        super().resume_writing()

    # Called by the parser, in this order for each request, and by the cycle of an answer

    def on_message_begin(self) -> None:
        if self._awaited is not _Awaited.HEADERS:  # the request before ended in the same bytes
            self._await(_Awaited.HEADERS)
        self._num_url_bytes = self._num_header_bytes = self._num_headers = 0
        self._has_begun = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of the request line."""
        self._num_url_bytes += len(url)
        self._num_header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer after a body."""
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value) + len(": \r\n")
        if self._num_headers > self._limits.num_headers:
            raise _RequestRefusedError(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"the request has more than {self._limits.num_headers} headers",
            )
        if self._num_header_bytes > self._limits.header_bytes:
            raise self._headers_too_large()
        if self._awaited is _Awaited.HEADERS:
            super().on_header(name, value)
        # uvicorn would add a trailer to the headers, which were already checked.

    def on_headers_complete(self) -> None:
        """Starts the request, or queues it behind an earlier one."""
        if len(self.pipeline) >= self._limits.num_pipelined:
            raise _PipelineFullError
        super().on_headers_complete()  # raises for an invalid address, before it makes a cycle
        self._has_begun = False
        self._await(_Awaited.BODY)
        self._num_pending = self._num_body_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._num_pending = 0
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_pending = 0
        self._await(_Awaited.NOTHING)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer is complete; the next request of the pipeline begins."""
        self._idle_since = self.loop.time()
        if self._awaited is _Awaited.BODY and self.cycle.response_complete:
            self._await(_Awaited.REST)
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # Sizes and times

    def _await(self, awaited: _Awaited) -> None:
        self._awaited, self._since = awaited, self.loop.time()

    @property
    def _is_all_answered(self) -> bool:
        """Whether every request whose headers are complete has its answer."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def _parse(self, part: memoryview) -> None:
        self._num_pending += len(part)
        try:
            self.parser.feed_data(part)
            if self._num_pending > self._limits.header_bytes:
                raise self._headers_too_large()
        except httptools.HttpParserUpgrade:
            # Answered as HTTP/1.1; the bytes that follow are in another protocol.
            self._stop_after_answers()
        except _RequestRefusedError as error:
            self._refuse(error.status, error.detail)
        except httptools.HttpParserError as error:
            why = error.__context__  # raised by a method above
            if isinstance(why, _PipelineFullError):
                self._stop_after_answers()
            elif isinstance(why, _RequestRefusedError):
                self._refuse(why.status, why.detail)
            else:
                self._refuse(HTTPStatus.BAD_REQUEST, "what was sent is not valid HTTP/1.1")

    def _headers_too_large(self) -> _RequestRefusedError:
        limit = self._limits.header_bytes
        if self._num_url_bytes > limit // 2:
            return _RequestRefusedError(
                HTTPStatus.REQUEST_URI_TOO_LONG,
                f"the request's address and headers are larger than {memory(limit)}",
            )
        return _RequestRefusedError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the request's headers are larger than {memory(limit)}",
        )

    def _client_reads_nothing(self, now: float) -> bool:
        if self._unread_since is None:
            return False
        num_unread = self.transport.get_write_buffer_size()
        if num_unread < self._num_unread:
            self._unread_since = now
        self._num_unread = num_unread
        return now - self._unread_since > self._limits.unread_s

    def _end_slow_headers(self) -> None:
        if not self._has_begun and self._is_all_answered:
            self._connections.note("a connection sent no request; it was closed")
            self.transport.close()
            return
        seconds = self._limits.header_s
        detail = f"the request's headers did not arrive within {seconds:g} s"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, detail)

    def _check_body(self, now: float) -> None:
        limits = self._limits
        allowed_s = limits.body_s + self._num_body_bytes / limits.body_bytes_per_s
        is_rest = self._awaited is _Awaited.REST
        if now - self._since > (limits.header_s if is_rest else allowed_s):
            detail = (
                f"{self._num_body_bytes} bytes of the request's body arrived in {allowed_s:.0f} s: a body "
                f"has {limits.body_s:g} s, and a second more for each {limits.body_bytes_per_s} bytes"
            )
            reason = "a request's body came too slowly"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, detail, reason=reason)

    # The end of the connection

    def _refuse(self, status: HTTPStatus, detail: str, *, reason: str | None = None) -> None:
        """Refuses the request that is being read, and reads no more.

        A client reads answers in the order of its requests, and takes what comes next for the
        answer to the oldest one. So the refusal can be sent only where nothing else is to come.
        """
        self._connections.note(reason or f"{status}: {detail}")
        self._is_ending = True
        if self._awaited in (_Awaited.HEADERS, _Awaited.NOTHING):
            # It has no cycle yet.
            if self._is_all_answered:
                self._answer(status, detail)
            else:
                self._stop_after_answers()
        elif self.pipeline:
            # It waits behind others, and must not start without its body. The request before it is
            # the last one, after whose answer the connection is closed.
            self.pipeline.popleft()
            last = self.pipeline[0][0] if self.pipeline else self._running
            last.keep_alive = False
        elif self.cycle.response_started:
            if not self.cycle.response_complete:
                self.transport.abort()  # the client sees that the answer is cut off
            self._hang_up()
        else:
            # The application, which waits for the body, learns that there is nobody to answer.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._answer(status, detail)

    def _stop_after_answers(self) -> None:
        """Reads no more, and closes the connection after the requests so far are answered."""
        self._is_ending = True
        if self._is_all_answered:
            self._hang_up()
        else:
            self.cycle.keep_alive = False

    def _answer(self, status: HTTPStatus, detail: str) -> None:
        self.transport.write(refusal(status, detail))
        self._hang_up()

    def _hang_up(self) -> None:
        """Closes the connection after the client has had time to read its answer."""
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(self._limits.linger_s, self.transport.close)


def refusal(status: HTTPStatus, detail: str, headers: Mapping[str, str] | None = None) -> bytes:
    """A response with a problem document, as bytes; it is the last on its connection."""
    answer = problem_response(status, detail, headers={"Connection": "close", **(headers or {})})
    lines = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
    lines += [name + b": " + value for name, value in answer.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(answer.body)])

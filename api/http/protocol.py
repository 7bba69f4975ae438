"""HTTP/1.1 on one connection, with limits on the size and the time of requests.

uvicorn's protocol does not limit the header. Its parser joins the parts of a header again with each
new part, so the time grows with the square of the header's size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from api.http.connection_limits import Connections
from api.http.problems import problem_response

_PARSED_AT_ONCE: Final = 16 << 10
"""Bytes that the parser gets between two checks of its progress."""


class _RequestRefusedError(Exception):
    """Raised in a callback of the parser to stop it."""

    def __init__(self, status: HTTPStatus, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


class _PipelineFullError(Exception):
    """Raised likewise, because too many requests wait on this connection."""


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
        """A connection that is not open yet.

        Args:
            config: uvicorn's configuration.
            server_state: uvicorn's state of the server.
            app_state: uvicorn's state of the application.
            connections: has the limits, and logs refusals.
            on_lost: called when the connection is closed.
        """
        super().__init__(config, server_state, app_state)
        self._connections, self._limits, self._on_lost = connections, connections.limits, on_lost
        now = self.loop.time()
        self._idle_since = now
        self._header_since: float | None = now
        self._body_since: float | None = None
        self._unread_since: float | None = None
        self._closing_since: float | None = None
        self._num_unread = 0
        self._num_url_bytes = self._num_header_bytes = self._num_headers = self._num_body_bytes = 0
        # Bytes since the parser last completed a header, a part of a body, or a request.
        self._num_pending = 0
        self._has_begun = False
        """Whether a request line has begun and its headers are incomplete; ignores empty lines."""
        self._is_draining = False
        self._is_deaf = False
        self._running: RequestResponseCycle = None  # type: ignore[assignment]

    # Called by the server

    @property
    def idle_since(self) -> float | None:
        """When the service began to wait for the client; None: a request is being answered."""
        is_at_work = self.cycle is not None and not self.cycle.response_complete
        is_unread = self.flow is not None and self.flow.write_paused
        return None if is_at_work and not is_unread else self._idle_since

    def check(self, now: float, elapsed_s: float) -> None:
        """Closes the connection if its client is too slow.

        Args:
            now: the loop's seconds.
            elapsed_s: seconds since the previous check.
        """
        if self.transport.is_closing():
            self._closing_since = now if self._closing_since is None else self._closing_since
            if now - self._closing_since > self._limits.unread_s:
                self.transport.abort()  # the client does not read the rest
            return
        if self._reads_nothing(now):
            self._connections.note("a client did not read its answer; its connection was closed")
            self.transport.abort()
        elif self._is_deaf:
            pass
        elif self._header_since is not None:
            if now - self._header_since > self._limits.header_s:
                self._end_slow_header()
        elif self._body_since is not None:
            self._check_body(now, elapsed_s)

    # Called by the transport

    def data_received(self, data: bytes) -> None:
        """Parses the received bytes in parts."""
        self._unset_keepalive_if_required()
        if self._body_since is None and self._header_since is None:
            self._header_since = self.loop.time()
        parts = memoryview(data)
        for start in range(0, len(data), _PARSED_AT_ONCE):
            # The connection was closed or refused: the rest is dropped.
            if self._is_deaf or self.parser is None:
                return
            self._parse(parts[start : start + _PARSED_AT_ONCE])

    def connection_lost(self, exc: Exception | None) -> None:
        """Cleans up a closed connection."""
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

    # Called by the parser

    def on_message_begin(self) -> None:
        """Starts the time of a request's header."""
        if self._header_since is None:
            self._header_since = self.loop.time()
        self._num_url_bytes = self._num_header_bytes = self._num_headers = 0
        self._has_begun = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Counts a part of the request line."""
        self._num_url_bytes += len(url)
        self._num_header_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Counts a header, or a trailer after a body."""
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value) + len(": \r\n")
        if self._num_headers > self._limits.num_headers:
            raise self._too_large(f"the request has more than {self._limits.num_headers} headers")
        if self._num_header_bytes > self._limits.header_bytes:
            raise self._header_too_large()
        if self._body_since is None:
            super().on_header(name, value)
        # uvicorn would add a trailer to the headers, which were already checked.

    def on_headers_complete(self) -> None:
        """Starts the request, or queues it behind an earlier one."""
        if len(self.pipeline) >= self._limits.num_pipelined:
            raise _PipelineFullError
        super().on_headers_complete()  # raises for an invalid address, before it makes a cycle
        self._has_begun = False
        self._header_since, self._body_since = None, self.loop.time()
        self._num_pending = self._num_body_bytes = 0
        self._is_draining = False

    def on_body(self, body: bytes) -> None:
        """Counts a part of the body."""
        self._num_pending = 0
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is complete."""
        self._num_pending = 0
        self._body_since = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A response is complete."""
        self._idle_since = self.loop.time()
        if self._body_since is not None and self.cycle.response_complete:
            # Answered before its body was read, for example refused.
            self._body_since, self._is_draining = self._idle_since, True
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _parse(self, part: memoryview) -> None:
        self._num_pending += len(part)
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade:
            # Answered as HTTP/1.1; the bytes that follow are in another protocol.
            self._stop_after_answers()
        except httptools.HttpParserError as error:
            why = error.__context__
            if isinstance(why, _PipelineFullError):
                self._stop_after_answers()
            elif isinstance(why, _RequestRefusedError):
                self._refuse(why.status, why.detail)
            else:
                self._refuse(HTTPStatus.BAD_REQUEST, "what was sent is not valid HTTP/1.1")
        else:
            if self._num_pending > self._limits.header_bytes:
                refusal = self._header_too_large()
                self._refuse(refusal.status, refusal.detail)

    def _header_too_large(self) -> _RequestRefusedError:
        limit = self._limits.header_bytes
        if self._num_url_bytes > limit // 2:
            detail = f"the request's address and headers are larger than {limit} bytes"
            return _RequestRefusedError(HTTPStatus.REQUEST_URI_TOO_LONG, detail)
        return self._too_large(f"the request's headers are larger than {limit} bytes")

    def _too_large(self, detail: str) -> _RequestRefusedError:
        return _RequestRefusedError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, detail)

    # Closing the connection

    def _reads_nothing(self, now: float) -> bool:
        if self._unread_since is None:
            return False
        num_unread = self.transport.get_write_buffer_size()
        if num_unread < self._num_unread:
            self._unread_since = now
        self._num_unread = num_unread
        return now - self._unread_since > self._limits.unread_s

    def _end_slow_header(self) -> None:
        if not self._has_begun and (self.cycle is None or self.cycle.response_complete):
            self._connections.note("a connection sent no request; it was closed")
            self.transport.close()
            return
        seconds = self._limits.header_s
        detail = f"the request's headers did not arrive within {seconds:g} s"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, detail)

    def _check_body(self, now: float, elapsed_s: float) -> None:
        assert self._body_since is not None
        if self.flow.read_paused:
            # The service has paused reading.
            self._body_since += elapsed_s
            return
        limits = self._limits
        allowed_s = limits.body_s + self._num_body_bytes / limits.body_bytes_per_s
        if now - self._body_since > (limits.header_s if self._is_draining else allowed_s):
            detail = (
                f"{self._num_body_bytes} bytes of the request's body arrived in {allowed_s:.0f} s: a body "
                f"has {limits.body_s:g} s, and a second more for each {limits.body_bytes_per_s} bytes"
            )
            self._refuse(
                HTTPStatus.REQUEST_TIMEOUT, detail, reason="a request's body came too slowly"
            )

    def _stop_after_answers(self) -> None:
        """Stops reading, and closes the connection after the requests so far are answered."""
        self._is_deaf = True
        if self.cycle is None or self.cycle.response_complete:
            self._hang_up()
        else:
            self.cycle.keep_alive = False

    def _refuse(self, status: HTTPStatus, detail: str, *, reason: str | None = None) -> None:
        """Refuses the request that is being read, and stops reading."""
        self._connections.note(reason or f"{status}: {detail}")
        self._is_deaf = True
        if self._body_since is None:
            if self.cycle is None or self.cycle.response_complete:
                self._answer(status, detail)
            else:
                self._stop_after_answers()
        elif self.pipeline:
            # Its body is not complete, so it must not start. The request before it is the last.
            self.pipeline.popleft()
            last = self.pipeline[0][0] if self.pipeline else self._running
            last.keep_alive = False
        elif self.cycle.response_started:
            if not self.cycle.response_complete:
                self.transport.abort()
            self._hang_up()
        else:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._answer(status, detail)

    def _answer(self, status: HTTPStatus, detail: str) -> None:
        self.transport.write(refusal(status, detail))
        self._hang_up()

    def _hang_up(self) -> None:
        """Closes the connection after the client has had time to read its response."""
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

"""Accepts connections, so that limits apply from the first byte, before TLS and HTTP."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from threading import Event
from typing import Any, Final

import uvicorn
from starlette.types import ASGIApp

from layout_tuner.api.background_loops import aligned_pause_s, wait_for
from layout_tuner.api.http.connection_limits import ConnectionLimits, Connections, OpenConnection
from layout_tuner.api.http.protocol import LimitedProtocol, refusal
from layout_tuner.api.http.rate_limit import network_of

ACCEPT_AGAIN_S: Final = 0.5
"""Seconds to wait after the system could not accept a connection."""

RETRY_AFTER_S: Final = 5

TICK_S: Final = 1.0
"""Seconds after which the date in the headers of responses is renewed."""

SHUTDOWN_PATIENCE_S: Final = 5
"""Seconds that requests may go on when the service ends."""

_TLS_HANDSHAKE: Final = b"\x16"
_MAX_TURNED_AWAY: Final = 64
"""Refused clients that get a response at the same time; others are disconnected."""

_log = logging.getLogger(__name__)


class LimitedServer(uvicorn.Server):
    """A server that limits connections, and ends when `stopping` is set, also before its start."""

    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits,
        stopping: Event,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """The limits are for clients that have not sent a token yet."""
        self._stopping = stopping
        config = uvicorn.Config(
            app,
            log_config=None,  # it logs as everything else does, see `log_to_stderr`
            access_log=False,
            server_header=False,
            http=LimitedProtocol,
            ws="none",
            proxy_headers=False,  # `OwnerHeader` reads them
            timeout_graceful_shutdown=SHUTDOWN_PATIENCE_S,
            ssl_context_factory=None if tls is None else lambda _config, _make: tls,
        )
        super().__init__(config)
        self._limits = limits
        self.connections = Connections(limits)
        self._tasks: set[asyncio.Task[None]] = set()
        self._num_turned_away = 0
        self._wake: Callable[[], object] = lambda: None

    @property
    def should_exit(self) -> bool:
        """Whether to end."""
        return self._stopping.is_set()

    @should_exit.setter
    def should_exit(self, value: bool) -> None:
        """Can be set by a signal handler, and by any thread."""
        if value and not self._stopping.is_set():
            self._stopping.set()
            self._wake()

    async def main_loop(self) -> None:
        """Serves until it is to end. Uvicorn's own loop looks for that ten times a second."""
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(end.set)
        while not await self.on_tick(0):
            await wait_for(end, aligned_pause_s(loop.time(), TICK_S))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts to accept connections when the application is ready."""
        await super().startup(sockets=[])
        for listener in sockets or ():
            listener.setblocking(False)
            self._spawn(self._accept(listener))
        self._spawn(self._check())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting connections, and waits for the requests that are being answered."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await super().shutdown(sockets)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(listener)
            except OSError as error:
                self.connections.note(f"no connection can be accepted: {error.strerror}")
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            peer = network_of(address[0]) if isinstance(address, tuple) else ""
            connection = OpenConnection(accepted, peer, loop.time())
            try:
                if self.connections.admit(connection):
                    self._spawn(self._open(accepted, connection))
                else:
                    self._turn_away_full(accepted)
            except Exception:  # an exception must not end this loop
                _log.exception("a connection was not taken")
                accepted.close()

    async def _open(self, accepted: socket.socket, connection: OpenConnection) -> None:
        """Starts TLS or HTTP on an accepted connection."""
        is_made = False
        try:
            # Otherwise small responses wait for the client to acknowledge their headers.
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.config.ssl is not None and not await self._begins_tls(accepted):
                return
            await self._make(accepted, connection)
            is_made = True
        except (OSError, ssl.SSLError, TimeoutError) as error:
            _log.debug("a connection was not made: %s", error or type(error).__name__)
        finally:
            if not is_made:
                self.connections.discard(connection)
                accepted.close()

    async def _make(self, accepted: socket.socket, connection: OpenConnection) -> None:
        protocol = LimitedProtocol(
            self.config,
            self.server_state,
            self.lifespan.state,
            connections=self.connections,
            on_lost=lambda: self.connections.discard(connection),
        )
        tls = self.config.ssl
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: protocol,
            accepted,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self._limits.header_s,
            ssl_shutdown_timeout=None if tls is None else self._limits.linger_s,
        )
        connection.protocol = protocol

    async def _begins_tls(self, accepted: socket.socket) -> bool:
        """Whether the client begins a TLS handshake; plain HTTP is answered with the problem."""
        async with asyncio.timeout(self._limits.header_s):
            await _readable(accepted)
        first = accepted.recv(1, socket.MSG_PEEK)
        if first == _TLS_HANDSHAKE:
            return True
        self.connections.note("a connection to the TLS port did not begin with TLS")
        if first.isalpha():
            detail = "this port speaks TLS: the address begins with https://, not http://"
            await self._turn_away(accepted, refusal(HTTPStatus.BAD_REQUEST, detail))
        return False

    def _turn_away_full(self, accepted: socket.socket) -> None:
        if self.config.ssl is not None or self._num_turned_away >= _MAX_TURNED_AWAY:
            accepted.close()
            return
        detail = (
            f"the service holds {self._limits.max_connections} connections already, and each has a request at "
            "work; try again later, or start it with more --max-connections"
        )
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        answer = refusal(HTTPStatus.SERVICE_UNAVAILABLE, detail, headers)
        self._spawn(self._turn_away(accepted, answer))

    async def _turn_away(self, accepted: socket.socket, answer: bytes) -> None:
        """Sends a response without reading the request, then waits until the client disconnects."""
        loop = asyncio.get_running_loop()
        self._num_turned_away += 1
        try:
            async with asyncio.timeout(self._limits.linger_s):
                await loop.sock_sendall(accepted, answer)
                accepted.shutdown(socket.SHUT_WR)
                while await loop.sock_recv(accepted, 65536):
                    pass
        except (OSError, TimeoutError):
            pass  # the client has disconnected, or its time is over
        finally:
            self._num_turned_away -= 1
            accepted.close()

    async def _check(self) -> None:
        """Searches for slow connections."""
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            await asyncio.sleep(self._limits.check_interval_s)
            now = loop.time()
            for protocol in tuple(self.server_state.connections):
                if isinstance(protocol, LimitedProtocol):
                    protocol.check(now, now - before)
            before = now


async def _readable(accepted: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(accepted, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(accepted)

"""Accepts the connections of a launcher's agents; one thread reads them all."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from layout_tuner.workers.launchers.agent import ALIVE_EVERY_S, notice_a_dead_peer
from layout_tuner.workers.ranks.json_lines import Document, JsonLines

_LOG = logging.getLogger(__name__)

_BACKLOG: Final = 4096
_STRANGERS_MAY_STAY_S: Final = 15.0
_MOST_OF_A_STRANGER_BYTES: Final = 1 << 16
_AGENTS_MAY_BE_SILENT_S: Final = ALIVE_EVERY_S + 15.0
_LOOK_EVERY_S: Final = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Receiver:
    """Who takes the events of one agent. Neither of the two may block."""

    take: Callable[[list[Document]], None]
    disconnected: Callable[[bool], None]
    """Called with whether the connection was cut, and not closed by the agent's end."""


OnConnected = Callable[[Document, JsonLines], Receiver | None]
"""Called with an agent's greeting, and its line; None: it is not expected."""


@dataclass(kw_only=True, slots=True)
class _AgentConnection:
    """A connection, and the receiver of its agent's events, once that is known."""

    line: JsonLines
    heard_at: float
    receiver: Receiver | None = None


class AgentListener:
    """Accepts connections, and has each received by whom its token belongs to.

    Args:
        address: to listen on, which the nodes can reach; the kernel chooses the port.
    """

    def __init__(self, address: str) -> None:
        self._server = socket.create_server((address, 0), backlog=_BACKLOG)
        self._server.setblocking(False)
        self.address = f"{address}:{self._server.getsockname()[1]}"
        self._expected: dict[str, OnConnected] = {}
        self._connections: dict[int, _AgentConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._end_r, self._end_w = socket.socketpair()
        self._selector.register(self._end_r, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._read, name="agent-listener", daemon=True)
        self._thread.start()

    def expect(self, token: str, on_connected: OnConnected) -> None:
        """Accepts agents with a token from now on."""
        self._expected[token] = on_connected

    def expect_no_more(self, token: str) -> None:
        """Refuses agents with the token from now on; existing connections stay open."""
        self._expected.pop(token, None)

    def close(self) -> None:
        self._end_w.close()
        self._thread.join()
        for connection in self._connections.values():
            connection.line.close()
        for opened in (self._server, self._end_r):
            opened.close()
        self._selector.close()

    def _read(self) -> None:
        while True:
            for key, _ in self._selector.select(_LOOK_EVERY_S):
                if key.fileobj is self._end_r:
                    return
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._receive(self._connections[key.fd])
            self._close_the_silent()

    def _accept(self) -> None:
        try:
            accepted, _ = self._server.accept()
        except OSError:  # the other end has already closed it
            return
        notice_a_dead_peer(accepted)
        connection = _AgentConnection(line=JsonLines(accepted), heard_at=time.monotonic())
        self._connections[accepted.fileno()] = connection
        self._selector.register(accepted, selectors.EVENT_READ)

    def _receive(self, connection: _AgentConnection) -> None:
        try:
            documents = connection.line.read(block=False)
            if connection.receiver is None and documents:
                connection.receiver = self._receiver(documents.pop(0), connection.line)
            if connection.receiver is not None:
                connection.heard_at = time.monotonic()
                if documents:
                    connection.receiver.take(documents)
        except (OSError, ValueError, LookupError, TypeError) as error:
            _LOG.warning("a connection was closed: %s", error)
            return self._close(connection, is_cut_off=True)
        if documents is None:
            return self._close(connection, is_cut_off=False)
        return None

    def _receiver(self, hello: Document, line: JsonLines) -> Receiver:
        """Who takes the events of an agent; LookupError if its token is not expected."""
        on_connected = self._expected.get(hello["token"])
        receiver = None if on_connected is None else on_connected(hello, line)
        if receiver is None:
            raise LookupError(f"{hello.get('name')!r} sent no token of an agent that is expected")
        return receiver

    def _close(self, connection: _AgentConnection, *, is_cut_off: bool) -> None:
        self._selector.unregister(connection.line.socket)
        del self._connections[connection.line.socket.fileno()]
        connection.line.close()
        if connection.receiver is not None:
            connection.receiver.disconnected(is_cut_off)

    def _close_the_silent(self) -> None:
        """Closes connections of agents that hang, and of others that do not greet."""
        now = time.monotonic()
        for connection in list(self._connections.values()):
            is_agent = connection.receiver is not None
            patience_s = _AGENTS_MAY_BE_SILENT_S if is_agent else _STRANGERS_MAY_STAY_S
            is_long = connection.line.num_pending_bytes > _MOST_OF_A_STRANGER_BYTES
            if now > connection.heard_at + patience_s or (is_long and not is_agent):
                self._close(connection, is_cut_off=True)

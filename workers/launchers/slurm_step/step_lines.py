"""Connections from the nodes of Slurm steps: one listener, and one thread that reads them all."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import Final

from workers.launchers.slurm_step.step import Step
from workers.launchers.slurm_step.step_node import notice_a_dead_peer
from workers.ranks.json_lines import Document, JsonLines

_LOG = logging.getLogger(__name__)

_BACKLOG: Final = 4096
_STRANGERS_MAY_STAY_S: Final = 15.0
_MOST_OF_A_STRANGER_BYTES: Final = 1 << 16
_LOOK_EVERY_S: Final = 5.0


@dataclass(kw_only=True, slots=True)
class _NodeConnection:
    """A connection, and the node of a step that it is from, once that is known."""

    line: JsonLines
    since: float
    step: Step | None = None
    node: int = -1


class StepLines:
    """Accepts connections, and assigns each to the step whose token it sends.

    Args:
        address: to listen on, which the nodes can reach; the kernel chooses the port.
    """

    def __init__(self, address: str) -> None:
        self._server = socket.create_server((address, 0), backlog=_BACKLOG)
        self._server.setblocking(False)
        self.address = f"{address}:{self._server.getsockname()[1]}"
        self._expected: dict[str, Step] = {}
        self._connections: dict[int, _NodeConnection] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._end_r, self._end_w = socket.socketpair()
        self._selector.register(self._end_r, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._read, name="step-lines", daemon=True)
        self._thread.start()

    def expect(self, token: str, step: Step) -> None:
        """Accepts nodes with a token from now on."""
        self._expected[token] = step

    def expect_no_more(self, token: str) -> None:
        """Refuses nodes with the token from now on; existing connections stay open."""
        self._expected.pop(token, None)

    def close(self) -> None:
        """Closes all connections."""
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
            self._drop_silent_strangers()

    def _accept(self) -> None:
        try:
            accepted, _ = self._server.accept()
        except OSError:  # the other end has already closed it
            return
        notice_a_dead_peer(accepted)
        connection = _NodeConnection(line=JsonLines(accepted), since=time.monotonic())
        self._connections[accepted.fileno()] = connection
        self._selector.register(accepted, selectors.EVENT_READ)

    def _receive(self, connection: _NodeConnection) -> None:
        try:
            documents = connection.line.read(block=False)
            if connection.step is None and documents:
                self._assign(connection, documents.pop(0))
            if documents and connection.step is not None:
                connection.step.take(connection.node, documents)
        except (OSError, ValueError, LookupError, TypeError) as error:
            _LOG.warning("a connection was closed: %s", error)
            return self._close(connection, is_cut_off=True)
        if documents is None:
            return self._close(connection, is_cut_off=False)
        return None

    def _assign(self, connection: _NodeConnection, hello: Document) -> None:
        """Assigns a connection to the step of its token.

        Raises:
            LookupError: no step expects the token.
        """
        step = self._expected.get(hello["token"])
        node = None if step is None else step.connected(hello, connection.line)
        if step is None or node is None:
            raise LookupError(f"{hello.get('name')!r} sent no token of a step that is expected")
        connection.step, connection.node = step, node

    def _close(self, connection: _NodeConnection, *, is_cut_off: bool) -> None:
        self._selector.unregister(connection.line.socket)
        del self._connections[connection.line.socket.fileno()]
        connection.line.close()
        if connection.step is not None:
            connection.step.disconnected(connection.node, is_cut_off=is_cut_off)

    def _drop_silent_strangers(self) -> None:
        too_long_ago = time.monotonic() - _STRANGERS_MAY_STAY_S
        for connection in list(self._connections.values()):
            if connection.step is None and (
                connection.since < too_long_ago
                or connection.line.num_pending_bytes > _MOST_OF_A_STRANGER_BYTES
            ):
                self._close(connection, is_cut_off=True)

"""Where the nodes of Slurm steps call in: one listener, and one thread that reads from all of them."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from typing import Final, Protocol

from workers.json_lines import Document, JsonLines
from workers.step_node import notice_a_dead_peer

_LOG = logging.getLogger(__name__)

_BACKLOG: Final = 4096
_STRANGERS_MAY_STAY_S: Final = 15.0
_MOST_OF_A_STRANGER_BYTES: Final = 1 << 16
_LOOK_EVERY_S: Final = 5.0


class Caller(Protocol):
    """A step, as the lines of its nodes need to know it. Called by the reading thread: must not block."""

    def called(self, hello: Document, line: JsonLines) -> int | None:
        """A node has called in; returns its position, None: it is not one of the step's."""
        ...

    def said(self, node: int, documents: list[Document]) -> None:
        """What a node says."""
        ...

    def hung_up(self, node: int, *, is_cut_off: bool) -> None:
        """The node's task has closed its line or ended; or it is cut off, and nobody knows."""
        ...


@dataclass(kw_only=True, slots=True)
class _Call:
    line: JsonLines
    since: float
    caller: Caller | None = None
    node: int = -1


class StepLines:
    """Takes calls, and hands each to the step whose token it shows.

    Args:
        address: to listen on, which the nodes reach; the port is the kernel's choice.
    """

    def __init__(self, address: str) -> None:
        self._server = socket.create_server((address, 0), backlog=_BACKLOG)
        self._server.setblocking(False)
        self.address = f"{address}:{self._server.getsockname()[1]}"
        self._expected: dict[str, Caller] = {}
        self._calls: dict[int, _Call] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._end_r, self._end_w = socket.socketpair()
        self._selector.register(self._end_r, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._read, name="step-lines", daemon=True)
        self._thread.start()

    def expect(self, token: str, caller: Caller) -> None:
        """Lets in the nodes that show a token."""
        self._expected[token] = caller

    def expect_no_more(self, token: str) -> None:
        """Turns away who shows the token from now on; those that are in stay."""
        self._expected.pop(token, None)

    def close(self) -> None:
        """Hangs up on everybody."""
        self._end_w.close()
        self._thread.join()
        for call in self._calls.values():
            call.line.close()
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
                    self._hear(self._calls[key.fd])
            self._drop_silent_strangers()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:  # who called has gone already
            return
        notice_a_dead_peer(connection)
        call = _Call(line=JsonLines(connection), since=time.monotonic())
        self._calls[connection.fileno()] = call
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, call: _Call) -> None:
        try:
            documents = call.line.read(block=False)
            if call.caller is None and documents:
                self._introduce(call, documents.pop(0))
            if documents and call.caller is not None:
                call.caller.said(call.node, documents)
        except (OSError, ValueError, LookupError, TypeError) as error:
            _LOG.warning("a call was ended: %s", error)
            return self._hang_up(call, is_cut_off=True)
        if documents is None:
            return self._hang_up(call, is_cut_off=False)
        return None

    def _introduce(self, call: _Call, hello: Document) -> None:
        """Finds out whose node this is.

        Raises:
            LookupError: nobody's.
        """
        caller = self._expected.get(hello["token"])
        node = None if caller is None else caller.called(hello, call.line)
        if caller is None or node is None:
            raise LookupError(f"{hello.get('name')!r} showed no token of a step that is expected")
        call.caller, call.node = caller, node

    def _hang_up(self, call: _Call, *, is_cut_off: bool) -> None:
        self._selector.unregister(call.line.socket)
        del self._calls[call.line.socket.fileno()]
        call.line.close()
        if call.caller is not None:
            call.caller.hung_up(call.node, is_cut_off=is_cut_off)

    def _drop_silent_strangers(self) -> None:
        too_long_ago = time.monotonic() - _STRANGERS_MAY_STAY_S
        for call in list(self._calls.values()):
            if call.caller is None and (
                call.since < too_long_ago or call.line.num_pending_bytes > _MOST_OF_A_STRANGER_BYTES
            ):
                self._hang_up(call, is_cut_off=True)

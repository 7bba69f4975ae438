"""JSON documents over a stream socket, one a line: the protocol between agent, zygote and ranks."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any, Final

Document = dict[str, Any]

_CHUNK: Final = 1 << 16


class JsonLines:
    """One end of a connection that carries a JSON document a line.

    Writing blocks. For reading, `read` returns the documents that have arrived, and `receive`
    waits.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._pending = b""
        self._ready: list[Document] = []

    @property
    def num_pending_bytes(self) -> int:
        """Bytes of a document that has arrived in part."""
        return len(self._pending)

    def send(self, *documents: Document) -> None:
        """Writes documents, all at once.

        Raises:
            OSError: the other end has closed.
        """
        self.socket.sendall(b"".join(json.dumps(d).encode() + b"\n" for d in documents))

    def read(self, *, block: bool) -> list[Document] | None:
        """The documents that have arrived; None when the other end has closed.

        Args:
            block: whether to wait until at least some bytes have come.

        Raises:
            ValueError: the bytes are not JSON, or it is nested too deeply.
        """
        data = self._receive(block=block)
        ready, self._ready = self._ready, []  # what `receive` has left
        if data is None:
            return ready
        return ready + self._complete(data) if data else None

    def read_rest(self) -> list[Document]:
        """All documents that have arrived; to be called when the other end has stopped writing."""
        documents: list[Document] = []
        while data := self._receive(block=False):
            documents += self._complete(data)
        return documents

    def receive(self) -> Document | None:
        """Waits for the next document; None when the other end has closed."""
        while not self._ready:
            documents = self.read(block=True)
            if documents is None:
                return None
            self._ready = documents
        return self._ready.pop(0)

    def _receive(self, *, block: bool) -> bytes | None:
        """Some bytes, perhaps a part of a document; empty at the end; None: none have arrived."""
        try:
            return self.socket.recv(_CHUNK, 0 if block else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return b""

    def _complete(self, data: bytes) -> list[Document]:
        *lines, self._pending = (self._pending + data).split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("a document is nested too deep to be read") from error

    def end_writing(self) -> None:
        """Closes the connection for writing; the other end's documents can still be read."""
        with contextlib.suppress(OSError):  # the other end may have closed first
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes this end; a reader blocked on it in another thread wakes up."""
        with contextlib.suppress(OSError):  # the other end may have closed first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

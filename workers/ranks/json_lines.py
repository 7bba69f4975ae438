"""JSON documents, one a line, over a stream socket: how agent, zygote and ranks talk."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any, Final

Document = dict[str, Any]

_CHUNK: Final = 1 << 16


class JsonLines:
    """One end of a connection that carries a JSON document a line.

    Writing blocks; reading is up to the caller: `read` takes what is there, `receive` waits.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._pending = b""
        self._ready: list[Document] = []

    @property
    def num_pending_bytes(self) -> int:
        """Bytes of a document that has not arrived whole."""
        return len(self._pending)

    def send(self, *documents: Document) -> None:
        """Writes documents, all at once.

        Raises:
            OSError: the other end is gone.
        """
        self.socket.sendall(b"".join(json.dumps(d).encode() + b"\n" for d in documents))

    def read(self, *, block: bool) -> list[Document] | None:
        """The documents that have arrived; None when the other end has closed.

        Args:
            block: whether to wait until at least some bytes have come.
        """
        data = self._receive(block=block)
        if data is None:
            return []
        return self._complete(data) if data else None

    def read_rest(self) -> list[Document]:
        """All documents that have arrived; to be asked when the other end has written its last."""
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
        """Some bytes, which may end within a document; none at the end; None: nothing is there."""
        try:
            return self.socket.recv(_CHUNK, 0 if block else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return b""

    def _complete(self, data: bytes) -> list[Document]:
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end_writing(self) -> None:
        """Tells the other end that nothing more will come; what it says can still be read."""
        with contextlib.suppress(OSError):  # it may have gone first
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes this end; a reader blocked on it in another thread wakes up."""
        with contextlib.suppress(OSError):  # the other end may have gone first
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

"""JSON documents over sockets, one a line: the protocol of worker, agent and ranks; its loop."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

Document = dict[str, Any]

_CHUNK: Final = 1 << 16
MOST_FDS: Final = 250
"""Descriptors that a document may carry; the kernel's limit is 253."""
_FDS_BYTES: Final = socket.CMSG_LEN(MOST_FDS * array("i").itemsize)


class JsonLines:
    """One end of a connection that carries a JSON document a line.

    Writing blocks; any thread may write. For reading, `read` returns the documents that have
    arrived, and `receive` waits.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._pending = b""
        self._ready: list[Document] = []
        self._fds: list[list[int]] = []
        self._sending = threading.Lock()

    @property
    def num_pending_bytes(self) -> int:
        """Bytes of a document that has arrived in part."""
        return len(self._pending)

    def send(self, *documents: Document) -> None:
        """Writes documents, all at once. Raises OSError if the other end has closed."""
        with self._sending:
            self.socket.sendall(_encoded(*documents))

    def send_with_fds(self, document: Document, fds: Sequence[int]) -> None:
        """Writes a document with at most `MOST_FDS` descriptors over a Unix socket; as `send`."""
        data = _encoded(document)
        with self._sending:
            num_sent = socket.send_fds(self.socket, [data], fds)
            self.socket.sendall(data[num_sent:])

    def take_fds(self) -> list[int]:
        """The descriptors of the oldest document that carried some; fewer where no more fit."""
        return self._fds.pop(0)

    @property
    def fds(self) -> list[int]:
        """The descriptors that have not been taken."""
        return [fd for fds in self._fds for fd in fds]

    def read(self, *, block: bool) -> list[Document] | None:
        """The documents that have arrived; None when the other end has closed.

        With `block` it waits until at least some bytes have come.

        Raises:
            ValueError: the bytes are not JSON, or it is nested too deeply.
        """
        data = self._receive(block=block)
        ready, self._ready = self._ready, []  # what `receive` has left
        if data is None:
            return ready
        return ready + self._complete(data) if data else None

    def read_all(self) -> list[Document]:
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
        flags = socket.MSG_CMSG_CLOEXEC | (0 if block else socket.MSG_DONTWAIT)
        try:  # not `socket.recv_fds`: it ignores the flags
            data, carried, received, _ = self.socket.recvmsg(_CHUNK, _FDS_BYTES, flags)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            return b""
        fds = array("i")
        for _level, _kind, content in carried:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
        if fds or received & socket.MSG_CTRUNC:
            self._fds.append(list(fds))
        return data

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


class Readers:
    """The event loop of a process: file descriptors to wait for, with their handlers."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], Any]] = {}

    def __iter__(self) -> Iterator[int]:
        """The descriptors, which a forked process must close."""
        return iter(tuple(self._handlers))

    def __contains__(self, fd: int) -> bool:
        return fd in self._handlers

    def add(self, fd: int, handler: Callable[[], Any]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, select.POLLIN)

    def remove(self, fd: int) -> None:
        """Removes a descriptor; it may have been removed before."""
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def handle(self, until: float | None) -> None:
        """Waits until a descriptor is readable, and calls the handlers.

        It waits up to a moment of the monotonic clock; None: without a limit.
        """
        left_ms = None if until is None else max(0, int(1e3 * (until - time.monotonic())) + 1)
        for fd, _ in self._poll.poll(left_ms):
            if fd in self._handlers:  # an earlier handler may have closed it
                self._handlers[fd]()


def _encoded(*documents: Document) -> bytes:
    return b"".join(json.dumps(document).encode() + b"\n" for document in documents)

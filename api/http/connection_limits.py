"""Limits of connections, and which idle ones are closed when there are too many."""

from __future__ import annotations

import heapq
import logging
import resource
import socket
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from layout_tuner.api.errors import ServiceStartError
from layout_tuner.api.http.rate_limit import Throttle

if TYPE_CHECKING:
    from layout_tuner.api.http.protocol import LimitedProtocol

MAX_CONNECTIONS: Final = 2048
"""Most open connections of a process, unless it is started with another number."""

OTHER_FILES: Final = 256
"""Open files of the service besides its connections: the database, logs, modules."""

LOG_LINES_PER_S: Final = 1 / 60
"""Log lines per second about one reason to refuse or close connections."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionLimits:
    """Limits on a client that has not sent a token yet."""

    max_connections: int = MAX_CONNECTIONS
    header_bytes: int = 64 << 10
    """Most bytes of request line and headers; also the most between two parts of a body."""
    num_headers: int = 100
    header_s: float = 10.0
    """Seconds for a TLS handshake, for a request line with its headers, and for the rest of a body
    after its request was answered."""
    body_s: float = 30.0
    """Seconds for a body, plus one second for each `body_bytes_per_s` bytes of it."""
    body_bytes_per_s: int = 500
    unread_s: float = 30.0
    """Seconds for which a client may read nothing of a waiting response."""
    num_pipelined: int = 16
    """Most requests of a connection that wait while an earlier one is answered."""
    linger_s: float = 2.0
    """Seconds for which the service reads and drops what a refused client still sends. Closing a
    connection with unread bytes resets it, and the client could not read the refusal."""
    check_interval_s: float = 1.0
    """Seconds between two searches for slow connections."""


class OpenConnection:
    """An accepted connection."""

    def __init__(self, accepted: socket.socket, peer: str, since: float) -> None:
        self._accepted, self._since = accepted, since
        self.peer = peer
        self.protocol: LimitedProtocol | None = None
        """None: the TLS handshake is not complete."""

    @property
    def idle_since(self) -> float | None:
        """When the service began to wait for the client; None: a request is being answered."""
        return self._since if self.protocol is None else self.protocol.idle_since

    def abort(self) -> None:
        if self.protocol is not None and self.protocol.transport is not None:
            self.protocol.transport.abort()
            return
        with suppress(OSError):  # it may be closed already
            # The handshake, which waits for bytes, gets an end of file.
            self._accepted.shutdown(socket.SHUT_RDWR)


class Connections:
    """The connections of one process. Not thread-safe: the event loop uses it."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._open: set[OpenConnection] = set()
        self._log_lines = Throttle(per_s=LOG_LINES_PER_S, burst=1)
        self._num_unlogged: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: OpenConnection) -> bool:
        """Admits a connection; False: there are too many, and a request is being answered on each.

        If there are too many, the longest idle connections of the peer with the most connections
        are closed. So event streams and waiting workers stay connected, and a client that opens
        many connections without using them only displaces its own.
        """
        if len(self._open) >= self.limits.max_connections and not self._close_an_idle_one():
            self.note("every connection has a request at work; a new one was refused")
            return False
        self._open.add(connection)
        return True

    def discard(self, connection: OpenConnection) -> None:
        self._open.discard(connection)

    def note(self, reason: str) -> None:
        """Logs why a connection was refused or closed, at most once a minute for each reason."""
        if self._log_lines.take(reason) > 0:
            self._num_unlogged[reason] += 1
            return
        num_unlogged = self._num_unlogged.pop(reason, 0)
        more = f" ({num_unlogged} more since this was logged last)" if num_unlogged else ""
        _log.warning("%s%s", reason, more)

    def _close_an_idle_one(self) -> bool:
        num_of_peer = Counter(connection.peer for connection in self._open)
        idle = [
            (-num_of_peer[connection.peer], since, id(connection), connection)
            for connection in self._open
            if (since := connection.idle_since) is not None
        ]
        if not idle:
            return False
        # Several at once, so that the next connections need no search.
        for *_, victim in heapq.nsmallest(max(1, self.limits.max_connections // 64), idle):
            self._open.discard(victim)
            victim.abort()
        self.note(f"{self.limits.max_connections} connections were open; idle ones were closed")
        return True


def allow_connections(asked: int | None) -> int:
    """Raises this process's limit of open files for its connections.

    Without a number: as many as the system allows, up to `MAX_CONNECTIONS`.

    Returns:
        The most connections.

    Raises:
        ServiceStartError: the system's limit is too low for `asked`.
    """
    wanted = MAX_CONNECTIONS if asked is None else asked
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = wanted if hard == resource.RLIM_INFINITY else max(hard - OTHER_FILES, 1)
    if possible < wanted:
        if asked is not None:
            raise ServiceStartError(
                f"{asked} connections need {asked + OTHER_FILES} open files, and this process may have "
                f"at most {hard}: raise the limit (ulimit -Hn), or give --max-connections {possible}"
            )
        _log.warning(
            "this process may have %d open files, and so at most %d connections at once: raise the limit "
            "(ulimit -Hn) for %d",
            hard,
            possible,
            wanted,
        )
        wanted = possible
    needed = wanted + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        highest = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    return wanted

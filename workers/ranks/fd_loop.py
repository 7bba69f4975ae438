"""The event loop of zygote, keeper and `RankReports`: a handler for each file descriptor."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from typing import Any


class Readers:
    """File descriptors to wait for, with their handlers."""

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

    def handle(self, within_ms: int | None) -> None:
        """Waits, perhaps up to a limit, until a descriptor is readable, and calls the handlers."""
        for fd, _ in self._poll.poll(within_ms):
            if fd in self._handlers:  # an earlier handler may have closed it
                self._handlers[fd]()

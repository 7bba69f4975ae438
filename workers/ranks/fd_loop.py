"""Which handler is called when a descriptor has something to say: the heart of zygote and keeper."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from typing import Any


class Readers:
    """Descriptors that are waited on, with what each one's news is handled by."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], Any]] = {}

    def __iter__(self) -> Iterator[int]:
        """The descriptors: what a forked process has to close."""
        return iter(tuple(self._handlers))

    def __contains__(self, fd: int) -> bool:
        return fd in self._handlers

    def add(self, fd: int, handler: Callable[[], Any]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, select.POLLIN)

    def remove(self, fd: int) -> None:
        """Waits no more on a descriptor, which may have been removed before."""
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def handle(self, within_ms: int | None) -> None:
        """Waits for news, and has it handled.

        Args:
            within_ms: how long to wait; None: for ever.
        """
        for fd, _ in self._poll.poll(within_ms):
            if fd in self._handlers:  # an earlier handler of this turn may have closed it
                self._handlers[fd]()

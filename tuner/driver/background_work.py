"""Work on threads beside the driver's rounds, and pauses of work that lacks memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from layout_tuner.protocol.connection.backoff import Backoff

T = TypeVar("T")

FIRST_PAUSE_S: Final = 5.0
LONGEST_PAUSE_S: Final = 300.0


class MemoryPause:
    """The pause of work for which the memory did not suffice; each is twice as long as the last."""

    def __init__(self) -> None:
        self._backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._until = 0.0

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._until

    def begin(self, what: str) -> str:
        """Begins a pause, and returns the line for the log."""
        pause_s = self._backoff.take()
        self._until = time.monotonic() + pause_s
        return f"too little memory for {what}; trying again in {pause_s:.0f} s"

    def end(self) -> None:
        """Notes that the work was done: the next pause is short."""
        self._backoff.reset()


def start_beside(name: str, work: Callable[[], T]) -> Future[T]:
    """Starts work on a thread of this name, and returns its result to come.

    The thread is a daemon: the work only reads, and may end at any point.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result

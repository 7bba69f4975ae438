"""Work that another thread does, and whose end is an event."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


def in_background(
    events: SimpleQueue[T], work: Callable[[], T], *, name: str, failed: Callable[[Exception], T]
) -> None:
    """Starts a thread that does something and says how it ended.

    Args:
        events: where the end is said.
        work: what is done; returns the event that says so.
        name: of the thread.
        failed: the event that says that `work` raised something.
    """

    def run() -> None:
        try:
            event = work()
        except Exception as error:  # the work ends here: every failure becomes an event
            event = failed(error)
        events.put(event)

    threading.Thread(target=run, name=name, daemon=True).start()

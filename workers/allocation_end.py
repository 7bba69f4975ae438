"""When the nodes are taken away: looked up now and then, on the monotonic clock."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from workers.worker_events import EndMoved, Events

_LOG = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 60.0
"""A wall time may be changed while the job runs; asking the scheduler costs its controller something."""

EndsIn = Callable[[], float | None]
"""Seconds until the nodes are taken away; None: nobody knows, or never."""


class AllocationEnd:
    """Tells the worker when its time is over, and again when that has changed.

    The look-up has a thread of its own: a scheduler's controller may take minutes to answer.

    Args:
        ends_in_s: looks it up.
        events: where it is told.
        look_every_s: seconds between two looks.
    """

    def __init__(
        self, ends_in_s: EndsIn, events: Events, *, look_every_s: float = _LOOK_EVERY_S
    ) -> None:
        self._ends_in_s = ends_in_s
        self._events = events
        self._look_every_s = look_every_s
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="allocation-end", daemon=True).start()

    def close(self) -> None:
        """Looks no more."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            now = time.monotonic()
            try:
                left_s = self._ends_in_s()
            except Exception as error:  # what was known before is better than no worker
                _LOG.warning("the end of the allocation is not known: %s", error)
            else:
                self._events.put(EndMoved(ends_at=None if left_s is None else now + left_s))
            self._closing.wait(self._look_every_s)


def ends_after(seconds: float) -> EndsIn:
    """The nodes are taken away so many seconds from now."""
    ends_at = time.monotonic() + seconds
    return lambda: max(0.0, ends_at - time.monotonic())

"""The wish that a worker end: SIGTERM or SIGINT, heard at once while it waits."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class DrainRequested(BaseException):
    """Raised out of whatever the worker waits for."""


class Drain:
    """Whether the worker has been asked to end.

    A wait is left by an exception; a loop over events is told by `on_request`. A second signal is as
    good as none: what is under way takes no second.
    """

    def __init__(self) -> None:
        self.requested = False
        self.on_request: Callable[[], object] = lambda: None
        """Is called, in a signal handler, when the worker is asked to end."""
        self._waiting = False

    def listen(self) -> None:
        """Takes over SIGTERM and SIGINT."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._hear)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what may be left at any point.

        Raises:
            DrainRequested: the worker was asked to end, before or meanwhile.
        """
        self._waiting = True
        try:
            if self.requested:
                raise DrainRequested
            yield
        finally:
            self._waiting = False

    def sleep(self, seconds: float) -> None:
        """Waits, unless the worker is asked to end.

        Raises:
            DrainRequested: it was.
        """
        with self.waiting():
            time.sleep(seconds)

    def _hear(self, *_: Any) -> None:
        self.requested = True
        self.on_request()
        if self._waiting:
            self._waiting = False
            raise DrainRequested

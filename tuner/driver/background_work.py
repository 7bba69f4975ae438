"""Work on threads beside the driver's rounds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


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

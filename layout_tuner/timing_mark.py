"""Whether ranks on this machine time iterations at the moment, known to the product's processes.

Ranks hold a shared lock on a file meanwhile. The kernel gives it back when a rank ends for any
reason. The file is named by the environment, where the product runs on the machine of its ranks.
Work that can wait does so: a lower priority would not do. Where the kernel groups processes by
session (sched_autogroup), it has no effect between sessions; without privileges it cannot be taken
back; and work of an idle class can stand still for minutes beside other users' processes.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

TIMING_VARIABLE: Final = "LAYOUT_TUNER_TIMING_MARK"
"""Path of the file; unset: the product's processes are elsewhere."""
LONGEST_WAIT_S: Final = 10.0
"""Most seconds for which work waits: a probe may be timed for minutes."""
_LOOK_S: Final = 0.2


def shares_cores() -> bool:
    """Whether this process may run on the cores of ranks, and so is told when they time."""
    return bool(os.environ.get(TIMING_VARIABLE))


@contextmanager
def timing() -> Iterator[None]:
    """In the block, `is_timing` is true in the product's processes on this machine."""
    fd = _open()
    try:
        if fd is not None:
            with suppress(OSError):  # someone looks just now, or this file system has no locks
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        if fd is not None:
            os.close(fd)


def is_timing() -> bool:
    """Whether some rank on this machine times iterations; False where that is not known."""
    fd = _open()
    if fd is None:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False


def wait_while_timing(wait: Callable[[float], bool], *, longest_s: float = LONGEST_WAIT_S) -> bool:
    """Waits until no rank on this machine times iterations, up to a limit.

    `wait` pauses and returns whether to stop; the result is whether it said so.
    """
    left_s = longest_s
    while left_s > 0 and is_timing():
        if wait(_LOOK_S):
            return True
        left_s -= _LOOK_S
    return False


def _open() -> int | None:
    path = os.environ.get(TIMING_VARIABLE)
    if not path:
        return None
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None

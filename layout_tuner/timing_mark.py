"""Whether ranks on this machine time iterations at the moment, known to the product's processes.

Ranks hold a shared lock on a file meanwhile, one for each user and machine, in its memory. The
kernel gives the lock back when a rank ends for any reason. So service, driver and worker see each
other's ranks, however they were started; a file that another user has put there is not used.
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
"""Path of another file; empty: nothing waits."""
SHARED_CORES_VARIABLE: Final = "LAYOUT_TUNER_SHARED_CORES"
"""`up` sets it for the service, the driver and the worker, which share cores with the ranks."""
LONGEST_WAIT_S: Final = 10.0
"""Most seconds for which work waits: a probe may be timed for minutes."""
_LOOK_S: Final = 1.0


def default_mark() -> str:
    """Path of the file of this user on this machine."""
    return f"/dev/shm/layout-tuner-timing-{os.getuid()}"  # noqa: S108 - see `_open`


def shares_cores() -> bool:
    """Whether this process was started by `up`, on the cores of the ranks."""
    return bool(os.environ.get(SHARED_CORES_VARIABLE))


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


def ranks_time_here() -> bool:
    """Whether ranks time iterations on the cores of this process, which `up` started."""
    return shares_cores() and is_timing()


def wait_while_timing(
    wait: Callable[[float], bool],
    *,
    longest_s: float = LONGEST_WAIT_S,
    can_wait: Callable[[], bool] = lambda: True,
) -> bool:
    """Waits until no rank on this machine times iterations, up to a limit.

    `wait` pauses and returns whether to stop; the result is whether it said so. `can_wait` says
    whether the work may wait longer.
    """
    left_s = longest_s
    while left_s > 0 and is_timing() and can_wait():
        if wait(_LOOK_S):
            return True
        left_s -= _LOOK_S
    return False


def _open() -> int | None:
    path = os.environ.get(TIMING_VARIABLE, default_mark())
    if not path:
        return None
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    if os.fstat(fd).st_uid != os.getuid():
        os.close(fd)
        return None
    return fd

"""How the lives of processes are bound together: the kernel's means, without torch or Ray.

Two of them are used. A *subreaper* becomes the parent of every orphan among its descendants, so
that a daemonised grandchild can still be found and ended. *Pidfds* tell without polling that a
process has ended, whoever its parent is. PR_SET_PDEATHSIG, the third, fires on the death of the
forking thread and is lost by daemons: it only speeds things up here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from workers.errors import RanksLeftError

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36

_LOOK_AGAIN_S: Final = 0.05
"""After so long, what else is there is looked for and killed beside what doesn't end."""

OnReaped = Callable[[int, int, int], None]
"""Is told of a child that was reaped: pid, wait status, and the most memory that it, or a child
that it reaped, had resident at once, in bytes (what it shared with others included)."""


def become_subreaper() -> None:
    """Makes this process the parent of every orphan among its descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Has the kernel kill this process when the thread that forked it ends.

    Args:
        parent_pid: who the parent should be; if it is gone already, this process ends here.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def fork(body: Callable[[], None]) -> int:
    """Forks a process that does `body` and ends; returns its pid.

    Whatever happens in it, it never gets back into its parent's code.
    """
    pid = os.fork()
    if pid != 0:
        return pid
    code = 1
    try:
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def children() -> list[int]:
    """Pids of this process's own children, orphans that it adopted included.

    The list may miss one that appears while it is read; only `os.waitpid` knows that none is left.
    """
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        found += map(int, path.read_text().split())
    return found or _children_by_parent(os.getpid())


def end_descendants(
    *,
    known: Collection[int] = (),
    deadline_s: float | None = None,
    on_reaped: OnReaped | None = None,
) -> None:
    """Kills and reaps until this process, a subreaper, has no descendant.

    Only direct children are signalled: they can't have been replaced by another process of the
    same pid, since nobody else reaps them. Their own children are adopted and have the next turn.

    Args:
        known: children that have not been reaped; they spare the look through all processes, which
            takes some milliseconds where the kernel keeps no list of children.
        deadline_s: seconds after which it is given up; None: never.
        on_reaped: is told of each.

    Raises:
        RanksLeftError: something can't be ended (it sits in a driver, say).
    """
    started = time.monotonic()
    awaited = set(known)

    def note(pid: int, status: int, peak_rss_bytes: int) -> None:
        awaited.discard(pid)
        if on_reaped is not None:
            on_reaped(pid, status, peak_rss_bytes)

    pause_s = 0.0005
    while True:
        waited_s = time.monotonic() - started
        kill(awaited if awaited and waited_s < _LOOK_AGAIN_S else children())
        if not reap(note):
            return
        if deadline_s is not None and waited_s > deadline_s:
            raise RanksLeftError(
                f"processes {children()} are still there {deadline_s:g} s after they were killed; "
                "look for a hung device or file system on this node"
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.02)


def kill(pids: Collection[int]) -> None:
    """Sends SIGKILL to children of this process, dead ones included."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def reap(on_reaped: OnReaped | None = None) -> bool:
    """Reaps what has ended; returns whether any child is left."""
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if on_reaped is not None:
            on_reaped(pid, status, usage.ru_maxrss * 1024)


def _children_by_parent(parent_pid: int) -> list[int]:
    """For kernels without /proc/PID/task/TID/children."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        if int(fields[1]) == parent_pid:
            found.append(int(path.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")

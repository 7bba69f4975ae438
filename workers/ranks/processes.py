"""Starting, watching and ending processes by means of the kernel, without torch or Ray.

A *subreaper* becomes the parent of every orphan among its descendants, so that a daemonised
grandchild can still be found and ended. A *pidfd* reports without polling that a process has ended,
also to processes other than its parent. With PR_SET_PDEATHSIG, the kernel kills a process when the
thread that forked it ends; a fork loses the setting, so daemons do not have it. It covers the case
that the first two do not: the end of the watching process itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from layout_tuner.process_resources import kernel_text
from layout_tuner.protocol.connection.backoff import Backoff
from layout_tuner.workers.errors import RanksLeftError

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36

_LOOK_AGAIN_S: Final = 0.05
"""After this time, new children are looked for in addition to the known ones."""

_LOG_TAIL_BYTES: Final = 8 << 10

OnReaped = Callable[[int, int, int], None]
"""Called for each reaped child: pid, wait status, and the peak resident memory in bytes of it or
of a child that it reaped, with shared memory."""

_SEARCH_PAUSE_S: Final = 0.01
_EMPTY_SEARCHES: Final = 2
"""Searches in a row that must find nothing before `end_marked` returns."""


def become_subreaper() -> None:
    """Makes this process the parent of every orphan among its descendants."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Makes the kernel kill this process when the thread that forked it ends.

    Where the parent has ended already, this process ends here.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def live_without_parent() -> None:
    """Undoes `die_with_parent`, for a process that watches its parent itself."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def fork(body: Callable[[], None]) -> int:
    """Forks a process that runs `body` and ends; returns its pid.

    The process never returns into its parent's code, also after an exception.
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


def children(of: int | None = None) -> list[int]:
    """Pids of a process's children, including adopted orphans; by default of this process.

    The list may miss a child that appears while it is read; only `os.waitpid` proves that none is
    left.
    """
    lists = [*Path(f"/proc/{of or 'self'}/task").glob("*/children")]
    found = [int(pid) for path in lists for pid in kernel_text(path).split()]
    if found or (of is not None and lists):
        return found
    return _children_by_parent(of or os.getpid())


def end_descendants(
    *,
    known: Collection[int] = (),
    deadline_s: float | None = None,
    on_reaped: OnReaped | None = None,
) -> None:
    """Kills and reaps until this process, a subreaper, has no descendant.

    Only direct children are signalled: no other process can have their pids, since only this
    process reaps them. Their own children are adopted, and signalled in the next round.

    Args:
        known: children that have not been reaped; with them the search through all processes is not
            needed, which takes some milliseconds where the kernel has no list of children.
        deadline_s: seconds after which to give up; None: never.
        on_reaped: called for each reaped child.

    Raises:
        RanksLeftError: a process can't be ended, for example since it waits in a driver.
    """
    started = time.monotonic()
    awaited = set(known)

    def note(pid: int, status: int, peak_rss_bytes: int) -> None:
        awaited.discard(pid)
        if on_reaped is not None:
            on_reaped(pid, status, peak_rss_bytes)

    backoff = Backoff(0.0005, 0.02)
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
        time.sleep(backoff.take())


def kill(pids: Collection[int]) -> None:
    """Sends SIGKILL to children of this process; they may have ended already."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def reap(on_reaped: OnReaped) -> bool:
    """Reaps the children that have ended; returns whether any child is left."""
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        on_reaped(pid, status, usage.ru_maxrss * 1024)


def ended_within(process: subprocess.Popen[bytes], within_s: float) -> bool:
    """Waits for the end of a process up to a time limit; returns whether it has ended."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    return process.returncode is not None


def end_signals() -> int:
    """Takes over SIGTERM, SIGINT and SIGHUP; returns a descriptor that one of them makes readable.

    The signals have no other effect.
    """
    signal_r, signal_w = os.pipe()
    os.set_blocking(signal_w, False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(signal_w, warn_on_full_buffer=False)
    return signal_r


def last_words(log_fd: int, most: int, *, but_not: str | None = None) -> str:
    """The last lines of a log, joined to one line; those with the text `but_not` are left out.

    Empty: there are none.

    The processes share the file's offset, so it is left where it is.
    """
    size = os.fstat(log_fd).st_size
    tail = os.pread(log_fd, _LOG_TAIL_BYTES, max(0, size - _LOG_TAIL_BYTES))
    lines = [line for line in tail.decode(errors="replace").splitlines() if line.strip()]
    return " / ".join([line for line in lines if but_not is None or but_not not in line][-most:])


def _children_by_parent(parent_pid: int) -> list[int]:
    """For kernels without /proc/PID/task/TID/children."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = kernel_text(path).rpartition(")")[2].split()  # none if it ended while we looked
        if fields[1:2] == [str(parent_pid)]:
            found.append(int(path.parent.name))
    return found


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def end_marked(variable: str, value: str, *, within_s: float) -> None:
    """Kills every other process of this user that was started with a variable of this value.

    It also finds processes whose parents have ended. Processes that set their title, as Ray's do,
    overwrite their arguments and the start of their environment, so the variable must be the last
    one.

    Raises:
        RanksLeftError: some are still running.
    """
    mark = os.fsencode(f"{variable}={value}")
    give_up_at = time.monotonic() + within_s
    num_empty_searches = 0
    while True:
        pids = [pid for pid in _own_processes() if _has(pid, mark)]
        # A process within execve has no environment for a moment, so one search may miss it.
        num_empty_searches = 0 if pids else num_empty_searches + 1
        if num_empty_searches == _EMPTY_SEARCHES:
            return
        for pid in pids:
            _kill(pid, mark)
        if pids and time.monotonic() > give_up_at:
            raise RanksLeftError(
                f"processes {pids} are still there {within_s:g} s after they were killed; "
                "look for a hung device or file system on this node"
            )
        time.sleep(_SEARCH_PAUSE_S)


def _own_processes() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if path.stat().st_uid == os.geteuid():
                found.append(int(path.name))
        except OSError:  # it ended while we looked
            continue
    return [pid for pid in found if pid != os.getpid()]


def _has(pid: int, mark: bytes) -> bool:
    """Whether a process has the mark; false where it has ended."""
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _kill(pid: int, mark: bytes) -> None:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        # The pidfd must be that of the marked process, not of a later one with its pid.
        if _has(pid, mark):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        os.close(pidfd)

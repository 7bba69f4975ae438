"""One rank as its zygote holds it: forked, placed on its device and cores, heard and logged."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workers.json_lines import JsonLines
from workers.processes import die_with_parent
from workers.rank_task import RankTask
from workers.visible_devices import rank_variables

RankEntry = Callable[[RankTask, JsonLines], None]
"""What runs in a rank: its task, and the line to its agent."""

LOG_TAIL_LINES: Final = 50
_LOG_TAIL_BYTES: Final = 32 << 10
_LOG_CHUNK: Final = 1 << 16
_OOM_SCORE: Final = 500


class LogTail:
    """The reading end of a rank's output; keeps the end of it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._kept = bytearray()
        os.set_blocking(fd, False)

    def fileno(self) -> int:
        return self._fd

    def keep_more(self) -> bool:
        """Takes what is there; returns whether there was anything."""
        try:
            data = os.read(self._fd, _LOG_CHUNK)
        except BlockingIOError:
            return False
        self._kept += data
        del self._kept[:-_LOG_TAIL_BYTES]
        return bool(data)

    def tail(self) -> str:
        """The last lines."""
        lines = self._kept.decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkedRank:
    """A rank that is alive, or has just been reaped."""

    task: RankTask
    pid: int
    pidfd: int
    line: JsonLines
    log: LogTail

    def name(self) -> dict[str, Any]:
        """Which rank an event is about."""
        return {"group": self.task.group, "rank": self.task.rank}

    def fds(self) -> tuple[int, int, int]:
        return self.pidfd, self.line.socket.fileno(), self.log.fileno()

    def close(self) -> None:
        self.line.close()
        os.close(self.pidfd)
        os.close(self.log.fileno())


def fork_rank(task: RankTask, entry: RankEntry, *, close_in_rank: Iterable[int]) -> ForkedRank:
    """Forks a rank, which runs the entry and ends.

    Args:
        task: what it is.
        entry: what it runs.
        close_in_rank: the zygote's own descriptors. A daemon that inherited the agent's socket
            would keep the agent reading for ever.
    """
    ours, theirs = socket.socketpair()
    log_r, log_w = os.pipe()
    zygote_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            for fd in (*close_in_rank, ours.fileno(), log_r):
                os.close(fd)
            _become(task, zygote_pid, log_w)
            entry(task, JsonLines(theirs))
            code = 0
        except BaseException:  # whatever a rank does, it must not fall back into the zygote's loop
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    theirs.close()
    os.close(log_w)
    return ForkedRank(
        task=task, pid=pid, pidfd=os.pidfd_open(pid), line=JsonLines(ours), log=LogTail(log_r)
    )


def _become(task: RankTask, zygote_pid: int, log_w: int) -> None:
    """Makes the forked process a rank: its output, life, cores and device."""
    os.dup2(log_w, 1)
    os.dup2(log_w, 2)
    os.close(log_w)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.setsid()
    die_with_parent(zygote_pid)
    faulthandler.enable()
    # Ends it even where Python doesn't run any more, and if nobody is left to end it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, task.deadline_s)
    # If memory gets short, a rank shall go before the worker, the service or the user's session.
    Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    if task.cores:
        allowed = os.sched_getaffinity(0)
        os.sched_setaffinity(0, allowed.intersection(task.cores) or allowed)
    os.environ["OMP_NUM_THREADS"] = "1"
    if task.device == "cuda":
        _apply(rank_variables(task.device_index, os.environ))


def _apply(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

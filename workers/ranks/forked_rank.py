"""One rank as its keeper holds it: forked, placed on its device and cores, heard and logged."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from workers.errors import CoresForbiddenError, WorkerError
from workers.json_lines import Document, JsonLines
from workers.processes import die_with_parent, fork
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
        close_in_rank: the keeper's own descriptors. A daemon that inherited the line to the zygote
            would keep it open, and a rank of another group could be read.

    Raises:
        OSError: the machine takes no further process.
    """
    ours, theirs = socket.socketpair()
    log_r, log_w = os.pipe()
    keeper_pid = os.getpid()

    def be_rank() -> None:
        for fd in (*close_in_rank, ours.fileno(), log_r):
            os.close(fd)
        line = JsonLines(theirs)
        try:
            _become(task, keeper_pid, log_w)
        except (OSError, WorkerError) as error:
            line.send(_complaint(f"it could not be given what is its own: {error}"))
            raise
        entry(task, line)

    try:
        pid = fork(be_rank)
    except OSError:
        ours.close()
        os.close(log_r)
        raise
    finally:
        theirs.close()
        os.close(log_w)
    return ForkedRank(
        task=task, pid=pid, pidfd=os.pidfd_open(pid), line=JsonLines(ours), log=LogTail(log_r)
    )


def _complaint(message: str) -> Document:
    return {"event": "error", "reason": "crashed", "transport": False, "message": message}


def _become(task: RankTask, keeper_pid: int, log_w: int) -> None:
    """Makes the forked process a rank: its output, life, cores and device."""
    os.dup2(log_w, 1)
    os.dup2(log_w, 2)
    os.close(log_w)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.setsid()
    die_with_parent(keeper_pid)
    faulthandler.enable()
    # Ends it even where Python doesn't run any more, and if nobody is left to end it.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, task.deadline_s)
    # If memory gets short, a rank shall go before the worker, the service or the user's session.
    Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    if task.cores:
        os.sched_setaffinity(0, allowed_cores(task.cores, os.sched_getaffinity(0)))
    os.environ["OMP_NUM_THREADS"] = "1"
    if task.device == "cuda":
        _apply(rank_variables(task.device_index, os.environ))


def _apply(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def allowed_cores(cores: Collection[int], allowed: Collection[int]) -> set[int]:
    """Those of a rank's cores that this process may give it.

    Raises:
        CoresForbiddenError: there is none.
    """
    given = set(cores) & set(allowed)
    if not given:
        raise CoresForbiddenError(
            f"cores {sorted(cores)} are none of those that the node gives us, {sorted(allowed)}; "
            "correct device_cores of the site, or the step's CPU binding"
        )
    return given

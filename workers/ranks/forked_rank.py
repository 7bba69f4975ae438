"""One rank: its keeper forks it, sets its device and cores, and reads its output.

The keeper ends it; where the keeper has died, the kernel does. Its own alarm watches its deadline.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from layout_tuner.workers.errors import CoresForbiddenError, WorkerError
from layout_tuner.workers.ranks.json_lines import JsonLines
from layout_tuner.workers.ranks.processes import die_with_parent, fork
from layout_tuner.workers.ranks.rank_task import RankTask
from layout_tuner.workers.ranks.visible_devices import rank_variables

RankEntry = Callable[[RankTask, JsonLines], None]
"""The function that a rank runs, with its task and its line to the node's agent."""

LOG_TAIL_LINES: Final = 50
_LOG_TAIL_BYTES: Final = 32 << 10
_LOG_CHUNK: Final = 1 << 16
_OOM_SCORE: Final = 500


class LogTail:
    """The reading end of a rank's output; keeps the last lines."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._kept = bytearray()
        os.set_blocking(fd, False)

    def fileno(self) -> int:
        return self._fd

    def keep_more(self) -> bool:
        """Reads the available output; returns whether there was any."""
        try:
            data = os.read(self._fd, _LOG_CHUNK)
        except BlockingIOError:
            return False
        self._kept += data
        del self._kept[:-_LOG_TAIL_BYTES]
        return bool(data)

    def tail(self) -> str:
        """The last lines, without NUL characters, which databases do not store in texts."""
        lines = self._kept.decode(errors="replace").replace("\0", "\ufffd").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkedRank:
    """A rank that runs, or has just been reaped."""

    task: RankTask
    pid: int
    pidfd: int
    log: LogTail


def fork_rank(
    task: RankTask, entry: RankEntry, line_fd: int, *, close_in_rank: Iterable[int]
) -> ForkedRank:
    """Forks a rank, which runs the entry and ends.

    Args:
        task: the rank's task.
        entry: the function that it runs.
        line_fd: its line to the node's agent; it is closed here.
        close_in_rank: descriptors of the keeper and of other ranks. Otherwise a daemon of the rank
            would keep lines to the agent open, and could read the output of other ranks.

    Raises:
        OSError: no process can be forked.
    """
    line_to_agent = socket.socket(fileno=line_fd)
    log_r, log_w = os.pipe()
    keeper_pid = os.getpid()

    def be_rank() -> None:
        for fd in (*close_in_rank, log_r):
            os.close(fd)
        line = JsonLines(line_to_agent)
        try:
            _become(task, keeper_pid, log_w)
        except (OSError, WorkerError) as error:
            message = f"its device, cores or limits could not be set: {error}"
            line.send(
                {"event": "error", "reason": "crashed", "transport": False, "message": message}
            )
            raise
        entry(task, line)

    try:
        pid = fork(be_rank)
    except OSError:
        os.close(log_r)
        raise
    finally:
        line_to_agent.close()
        os.close(log_w)
    return ForkedRank(task=task, pid=pid, pidfd=os.pidfd_open(pid), log=LogTail(log_r))


def _become(task: RankTask, keeper_pid: int, log_w: int) -> None:
    """Makes the forked process a rank: sets its output, end, cores and device."""
    os.dup2(log_w, 1)
    os.dup2(log_w, 2)
    os.close(log_w)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.setsid()
    die_with_parent(keeper_pid)
    faulthandler.enable()
    # Ends it even where Python hangs and the keeper has ended.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, task.deadline_s)
    # The kernel's out-of-memory killer must prefer ranks to the worker and the service.
    Path("/proc/self/oom_score_adj").write_text(str(_OOM_SCORE))
    if task.cores:
        os.sched_setaffinity(0, allowed_cores(task.cores, os.sched_getaffinity(0)))
    os.environ["OMP_NUM_THREADS"] = "1"
    if task.device == "cuda":
        for name, value in rank_variables(task.visible_devices, os.environ).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def allowed_cores(cores: Collection[int], allowed: Collection[int]) -> set[int]:
    """The cores of a rank that this process may use; CoresForbiddenError if there are none."""
    given = set(cores) & set(allowed)
    if not given:
        raise CoresForbiddenError(
            f"this process may use none of the cores {sorted(cores)}, only {sorted(allowed)}; correct "
            "device_cores of the site, or the step's CPU binding"
        )
    return given

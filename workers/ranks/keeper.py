"""The keeper of a group on one node: the zygote forks it; it forks, reaps and ends the ranks.

The node's agent watches the deadline of that end, and has the zygote kill a keeper that misses it.

It is a child subreaper, so that daemons below its ranks become its children. To end the group it
ends all of its descendants, and no other process. Like the zygote it has one thread and uses no
device. On its line to the agent it receives {"order": "end"}, and sends

    {"event": "exit", "group": ..., "rank": ..., "code": ..., "oom_kills": ...}
        of a rank that the out-of-memory killer may have struck also
        {"memory_available_bytes": ...,                      of the node, when the group started
         "memory_taken_bytes": {rank: ...}}                  at once, of its own, at the most
    {"event": "group_lost", "group": ..., "message": ...}    the ranks could not be forked
    {"event": "ended", "group": ..., "log_tails": {rank: text}, "left": str | null}   last

The ranks report to the agent themselves.

It has no PR_SET_PDEATHSIG: when the zygote or the agent ends, it ends the processes below it and
then itself, even if the warden has ended too.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from layout_tuner.process_resources import available_memory_bytes, kernel_text
from layout_tuner.workers.errors import RanksLeftError
from layout_tuner.workers.ranks.forked_rank import ForkedRank, RankEntry, fork_rank
from layout_tuner.workers.ranks.json_lines import Document, JsonLines, Readers
from layout_tuner.workers.ranks.processes import become_subreaper, end_descendants, reap
from layout_tuner.workers.ranks.rank_task import RankTask
from layout_tuner.workers.ranks.scratch import remove_directories

END_WITHIN_S: Final = 10.0
"""Seconds that killed processes may take to end, before the group's end says that some are left."""


@dataclass(kw_only=True)
class GroupKeeper:
    """The loop that forks the ranks of one group, reports their ends, and reaps them."""

    agent: JsonLines
    """Connection to the node's agent."""
    zygote_stopped: int
    """Read end of a pipe that the zygote closes when it ends; that is the end of the group."""
    tasks: Sequence[RankTask]
    line_fds: list[int]
    """The ranks' lines to the agent."""
    entry: RankEntry
    """What a rank runs."""

    def __post_init__(self) -> None:
        self._group = self.tasks[0].group
        self._ranks: list[ForkedRank] = []
        self._peak_rss_bytes: dict[int, int] = {}  # of the ranks that have been reaped
        self._readers = Readers()
        self._alive = True

    def run(self) -> None:
        """Starts the ranks, and serves until the group or the zygote has ended."""
        become_subreaper()
        self._readers.add(self.zygote_stopped, self._stop)
        self._readers.add(self.agent.socket.fileno(), self._take_orders)
        self._start()
        while self._alive:
            self._readers.handle(None)

    def _stop(self) -> None:
        """Ends the group without a report, since the zygote or the agent has ended."""
        end_descendants(known=self._pids())
        remove_directories(self.tasks[0])
        self._alive = False

    def _take_orders(self) -> None:
        orders = self.agent.read(block=False)
        if orders is None:
            self._stop()
        elif orders:
            self._end()

    def _start(self) -> None:
        self._oom_kills_before = oom_kills()
        self._memory_available_bytes = available_memory_bytes()
        try:
            for task in self.tasks:
                line_fd = self.line_fds.pop(0)
                inherited = (*self._readers, *self.line_fds)
                rank = fork_rank(task, self.entry, line_fd, close_in_rank=inherited)
                self._ranks.append(rank)
                self._readers.add(rank.log.fileno(), partial(self._keep_log, rank))
                self._readers.add(rank.pidfd, self._reap)
        except OSError as error:
            message = f"{len(self.tasks)} ranks could not be forked: {error}"
            self._send({"event": "group_lost", "group": self._group, "message": message})

    def _end(self) -> None:
        left = None
        try:
            end_descendants(known=self._pids(), deadline_s=END_WITHIN_S, on_reaped=self._note_exit)
        except RanksLeftError as error:
            left = str(error)
        tails = {}
        for rank in self._ranks:
            while rank.log.keep_more():
                pass
            tails[str(rank.task.rank)] = rank.log.tail()
        remove_directories(self.tasks[0])
        self._send({"event": "ended", "group": self._group, "log_tails": tails, "left": left})
        if left is not None:
            os._exit(1)  # the zygote goes on trying
        self._alive = False

    def _pids(self) -> list[int]:
        """The ranks that have not been reaped."""
        return [rank.pid for rank in self._ranks if rank.pidfd in self._readers]

    def _keep_log(self, rank: ForkedRank) -> None:
        if not rank.log.keep_more():
            self._readers.remove(rank.log.fileno())

    def _reap(self) -> None:
        """Reaps all ended ranks before it reports any, so that the memory of each is known."""
        reaped: list[tuple[int, int, int]] = []
        reap(lambda *exited: reaped.append(exited))
        exits = [(rank, status) for pid, status, peak in reaped for rank in self._took(pid, peak)]
        for rank, status in exits:
            self._report_exit(rank, status)

    def _note_exit(self, pid: int, status: int, peak_rss_bytes: int) -> None:
        for rank in self._took(pid, peak_rss_bytes):
            self._report_exit(rank, status)

    def _took(self, pid: int, peak_rss_bytes: int) -> list[ForkedRank]:
        """The rank of a reaped process, or an empty list; notes the peak of its memory."""
        for rank in self._ranks:
            if rank.pid == pid and rank.pidfd in self._readers:
                self._readers.remove(rank.pidfd)
                self._peak_rss_bytes[rank.task.rank] = peak_rss_bytes
                return [rank]
        return []

    def _report_exit(self, rank: ForkedRank, status: int) -> None:
        code = os.waitstatus_to_exitcode(status)
        exited: Document = {"event": "exit", "group": self._group, "rank": rank.task.rank}
        exited |= {"code": code, "oom_kills": self._oom_kills()}
        if code == -signal.SIGKILL and exited["oom_kills"]:
            exited["memory_available_bytes"] = self._memory_available_bytes
            exited["memory_taken_bytes"] = self._memory_taken_bytes()
        self._send(exited)

    def _memory_taken_bytes(self) -> dict[str, int]:
        """Peak memory of each rank, without the memory that it shares with the zygote."""
        peaks = dict(self._peak_rss_bytes)
        for rank in self._ranks:
            if rank.pidfd in self._readers:
                peaks[rank.task.rank] = memory_of(rank.pid)["VmHWM"]
        shared = memory_of(os.getppid())["VmRSS"]
        return {str(rank): max(0, peak - shared) for rank, peak in sorted(peaks.items())}

    def _oom_kills(self) -> int | None:
        before, now = self._oom_kills_before, oom_kills()
        return None if before is None or now is None else now - before

    def _send(self, event: Document) -> None:
        with suppress(OSError):  # the agent has ended; the end of its line reports that too
            self.agent.send(event)


def memory_of(pid: int) -> Counter[str]:
    """The kernel's counts of a process's memory, in bytes; empty where it has ended."""
    lines = kernel_text(Path(f"/proc/{pid}/status")).splitlines()
    sizes = [line.split() for line in lines if line.startswith(("Vm", "Rss"))]
    return Counter({name.rstrip(":"): int(kib) * 1024 for name, kib, _ in sizes})


def oom_kills() -> int | None:
    """Kills by the kernel's out-of-memory killer on this machine, in any cgroup.

    None: kernels before 4.13 do not count them.
    """
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None

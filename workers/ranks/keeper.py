"""The keeper of one group on one node: forked from the zygote, it forks the group's ranks.

It is a child subreaper of its own, so that what daemonises below its ranks is its own too, and the
end of its group is the end of all its descendants and of nobody else's. Like the zygote it runs one
thread and touches no device. Its line carries what the zygote passes on, see `workers.zygote`:
it takes "tell" and "end", and it gives "report", "exit" and "ended", which is its last word.

It has no PR_SET_PDEATHSIG: when the zygote is gone, it ends what is below it and then itself, even
if the warden is gone too.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from search_spaces.machine import available_memory_bytes
from workers.errors import RanksLeftError
from workers.forked_rank import ForkedRank, RankEntry, fork_rank
from workers.json_lines import Document, JsonLines
from workers.paced_line import PacedLine
from workers.processes import become_subreaper, end_descendants, reap
from workers.rank_task import RankTask
from workers.readers import Readers

END_WITHIN_S: Final = 10.0
"""Seconds that killed processes may take to end, before the group's end says that some are left."""


class GroupKeeper:
    """The loop that forks the ranks of one group, hears and logs them, and reaps them.

    Args:
        zygote: connection to the zygote.
        zygote_pid: whose end is the group's.
        tasks: the group's ranks on this node.
        entry: what a rank runs.
    """

    def __init__(
        self, zygote: JsonLines, *, zygote_pid: int, tasks: Sequence[RankTask], entry: RankEntry
    ) -> None:
        self._zygote = zygote
        self._zygote_pid = zygote_pid
        self._events = PacedLine(zygote)
        self._tasks = tasks
        self._entry = entry
        self._group = tasks[0].group
        self._ranks: list[ForkedRank] = []
        self._peak_rss_bytes: dict[int, int] = {}  # of the ranks that have been reaped
        self._readers = Readers()
        self._alive = True

    def run(self) -> None:
        """Starts the ranks, and serves until the group is ended or the zygote is gone."""
        become_subreaper()
        self._readers.add(os.pidfd_open(self._zygote_pid), self._stop)
        if os.getppid() != self._zygote_pid:  # it ended while this process was forked
            return
        self._readers.add(self._zygote.socket.fileno(), self._take_orders)
        self._start()
        while self._alive:
            self._readers.handle(self._events.due_in_ms())
            self._send_held()

    def _stop(self) -> None:
        """The zygote is gone: there is nobody to report to."""
        end_descendants(known=self._pids())
        self._alive = False

    def _take_orders(self) -> None:
        orders = self._zygote.read(block=False)
        if orders is None:
            return self._stop()
        for order in orders:
            match order["order"]:
                case "tell":
                    self._tell(order["document"])
                case "end":
                    self._end()
        return None

    def _start(self) -> None:
        self._oom_kills_before = _oom_kills()
        self._memory_available_bytes = available_memory_bytes()
        try:
            for task in self._tasks:
                self._hold(fork_rank(task, self._entry, close_in_rank=self._readers))
        except OSError as error:
            message = f"{len(self._tasks)} ranks could not be forked: {error}"
            self._send({"event": "group_lost", "group": self._group, "message": message})

    def _hold(self, rank: ForkedRank) -> None:
        self._ranks.append(rank)
        self._readers.add(rank.line.socket.fileno(), partial(self._relay, rank))
        self._readers.add(rank.log.fileno(), partial(self._keep_log, rank))
        self._readers.add(rank.pidfd, self._reap)

    def _tell(self, document: Document) -> None:
        for rank in self._ranks:
            try:
                rank.line.send(document)
            except OSError:  # it has died; its exit is reported on its own
                continue

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
        self._send({"event": "ended", "group": self._group, "log_tails": tails, "left": left})
        self._alive = False

    def _pids(self) -> list[int]:
        """The ranks that have not been reaped."""
        return [rank.pid for rank in self._ranks if rank.pidfd in self._readers]

    def _relay(self, rank: ForkedRank) -> None:
        """Passes on what a rank has reported."""
        documents = rank.line.read(block=False)
        if documents is None:
            self._readers.remove(rank.line.socket.fileno())
        self._report(rank, documents or [])

    def _report(self, rank: ForkedRank, documents: list[Document]) -> None:
        for document in documents:
            self._send({**rank.name(), "event": "report", "document": document})

    def _keep_log(self, rank: ForkedRank) -> None:
        if not rank.log.keep_more():
            self._readers.remove(rank.log.fileno())

    def _reap(self) -> None:
        """Reaps all that have ended before it reports any: whose fault it was may show in another."""
        reaped: list[tuple[int, int, int]] = []
        reap(lambda *exited: reaped.append(exited))
        exits = [(rank, status) for pid, status, peak in reaped for rank in self._took(pid, peak)]
        for rank, status in exits:
            self._report_exit(rank, status)

    def _note_exit(self, pid: int, status: int, peak_rss_bytes: int) -> None:
        for rank in self._took(pid, peak_rss_bytes):
            self._report_exit(rank, status)

    def _took(self, pid: int, peak_rss_bytes: int) -> list[ForkedRank]:
        """The rank that a reaped process was, if it was one; notes what it took of the memory."""
        for rank in self._ranks:
            if rank.pid == pid and rank.pidfd in self._readers:
                self._readers.remove(rank.pidfd)
                self._peak_rss_bytes[rank.task.rank] = peak_rss_bytes
                return [rank]
        return []

    def _report_exit(self, rank: ForkedRank, status: int) -> None:
        """Reports a rank's end, after everything that it said before."""
        self._report(rank, rank.line.read_rest())
        code = os.waitstatus_to_exitcode(status)
        exited = {"event": "exit", "code": code, "oom_kills": self._oom_kills()}
        if code == -signal.SIGKILL and exited["oom_kills"]:
            exited["memory_available_bytes"] = self._memory_available_bytes
            exited["memory_taken_bytes"] = self._memory_taken_bytes()
        self._send({**rank.name(), **exited})

    def _memory_taken_bytes(self) -> dict[str, int]:
        """The most that each rank had at once, beyond what it shares with the zygote."""
        peaks = dict(self._peak_rss_bytes)
        for rank in self._ranks:
            if rank.pidfd in self._readers:
                peaks[rank.task.rank] = memory_of(rank.pid)["VmHWM"]
        shared = memory_of(self._zygote_pid)["VmRSS"]
        return {str(rank): max(0, peak - shared) for rank, peak in sorted(peaks.items())}

    def _oom_kills(self) -> int | None:
        before, now = self._oom_kills_before, _oom_kills()
        return None if before is None or now is None else now - before

    def _send(self, event: Document) -> None:
        try:
            self._events.send(event)
        except OSError:  # the zygote is gone, which its pidfd tells too
            return

    def _send_held(self) -> None:
        try:
            self._events.flush_if_due()
        except OSError:
            return


def memory_of(pid: int) -> Counter[str]:
    """What the kernel says of a process's memory, in bytes; nothing of one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return Counter()
    sizes = [line.split() for line in lines if line.startswith("Vm")]
    return Counter({name.rstrip(":"): int(kib) * 1024 for name, kib, _ in sizes})


def _oom_kills() -> int | None:
    """How often the kernel's out-of-memory killer has struck on this machine, in any cgroup.

    None: kernels before 4.13 don't count.
    """
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None

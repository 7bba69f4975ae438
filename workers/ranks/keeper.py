"""The keeper of one group on one node: forked from the zygote, it forks the group's ranks.

It is a child subreaper, so that daemons below its ranks become its children. To end the group it
ends all of its descendants, and no other process. Like the zygote it has one thread and uses no
device. On its line to the zygote (see `workers.ranks.zygote`) it receives "tell" and "end", and
sends "report", "exit" and, last, "ended".

It has no PR_SET_PDEATHSIG: when the zygote ends, it ends the processes below it and then itself,
even if the warden has ended too.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from search_spaces.machine import available_memory_bytes
from workers.errors import RanksLeftError
from workers.ranks.fd_loop import Readers
from workers.ranks.forked_rank import ForkedRank, RankEntry, fork_rank
from workers.ranks.json_lines import Document, JsonLines
from workers.ranks.processes import become_subreaper, end_descendants, reap
from workers.ranks.rank_task import RankTask
from workers.ranks.scratch import remove_directories

HOLD_S: Final = 0.5
"""Seconds between two batches of iterations, which are only for users and heartbeats."""

END_WITHIN_S: Final = 10.0
"""Seconds that killed processes may take to end, before the group's end says that some are left."""


class PacedLine:
    """Sends events in their order: iterations in batches twice a second, all others at once.

    Each message wakes the agent, the raylet and the worker, on cores that the ranks are measured
    on. With iterations of milliseconds, one message for each would take more time than the probes.

    Args:
        line: to the zygote.
        hold_s: seconds between two batches of iterations.
    """

    def __init__(self, line: JsonLines, hold_s: float = HOLD_S) -> None:
        self._line = line
        self._hold_s = hold_s
        self._held: list[Document] = []
        self._next_lot_at = 0.0

    def send(self, event: Document) -> None:
        """Sends an event, or keeps it for the next batch.

        Raises:
            OSError: the other end has closed.
        """
        self._held.append(event)
        if not _can_wait(event) or time.monotonic() >= self._next_lot_at:
            self._flush()

    def flush_if_due(self) -> None:
        """Sends the kept events if they are due.

        Raises:
            OSError: the other end has closed.
        """
        if self._held and time.monotonic() >= self._next_lot_at:
            self._flush()

    def due_in_ms(self) -> int | None:
        """Milliseconds until the kept events are due; None: there are none."""
        if not self._held:
            return None
        return max(0, int(1e3 * (self._next_lot_at - time.monotonic())) + 1)

    def _flush(self) -> None:
        events, self._held = self._held, []
        if any(map(_can_wait, events)):
            self._next_lot_at = time.monotonic() + self._hold_s
        self._line.send(*events)


def _can_wait(event: Document) -> bool:
    return bool(event["event"] == "report" and event["document"]["event"] == "iteration")


class GroupKeeper:
    """The loop that forks the ranks of one group, passes on their reports, and reaps them.

    Args:
        zygote: connection to the zygote.
        zygote_pid: pid of the zygote; its end is the end of the group.
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
        """Starts the ranks, and serves until the group or the zygote has ended."""
        become_subreaper()
        self._readers.add(os.pidfd_open(self._zygote_pid), self._stop)
        if os.getppid() != self._zygote_pid:  # it ended while this process was forked
            return
        self._readers.add(self._zygote.socket.fileno(), self._take_orders)
        self._start()
        while self._alive:
            self._readers.handle(self._events.due_in_ms())
            with suppress(OSError):
                self._events.flush_if_due()

    def _stop(self) -> None:
        """Ends the group without a report, since the zygote has ended."""
        end_descendants(known=self._pids())
        remove_directories(self._tasks[0])
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
        self._oom_kills_before = oom_kills()
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
            with suppress(OSError):  # it has ended; its exit is a separate event
                rank.line.send(document)

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
        remove_directories(self._tasks[0])
        self._send({"event": "ended", "group": self._group, "log_tails": tails, "left": left})
        self._alive = False

    def _pids(self) -> list[int]:
        """The ranks that have not been reaped."""
        return [rank.pid for rank in self._ranks if rank.pidfd in self._readers]

    def _relay(self, rank: ForkedRank) -> None:
        """Passes on the reports of a rank."""
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
        """Reports a rank's end, after all of its reports."""
        self._report(rank, rank.line.read_rest())
        code = os.waitstatus_to_exitcode(status)
        exited = {"event": "exit", "code": code, "oom_kills": self._oom_kills()}
        if code == -signal.SIGKILL and exited["oom_kills"]:
            exited["memory_available_bytes"] = self._memory_available_bytes
            exited["memory_taken_bytes"] = self._memory_taken_bytes()
        self._send({**rank.name(), **exited})

    def _memory_taken_bytes(self) -> dict[str, int]:
        """Peak memory of each rank, without the memory that it shares with the zygote."""
        peaks = dict(self._peak_rss_bytes)
        for rank in self._ranks:
            if rank.pidfd in self._readers:
                peaks[rank.task.rank] = memory_of(rank.pid)["VmHWM"]
        shared = memory_of(self._zygote_pid)["VmRSS"]
        return {str(rank): max(0, peak - shared) for rank, peak in sorted(peaks.items())}

    def _oom_kills(self) -> int | None:
        before, now = self._oom_kills_before, oom_kills()
        return None if before is None or now is None else now - before

    def _send(self, event: Document) -> None:
        with suppress(OSError):  # the zygote has ended; its pidfd reports that too
            self._events.send(event)


def memory_of(pid: int) -> Counter[str]:
    """The kernel's counts of a process's memory, in bytes; empty where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return Counter()
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

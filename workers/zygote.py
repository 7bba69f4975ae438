"""The zygote: imports torch and the trainer once, and forks ranks that live for one task each.

It is single-threaded and never touches a device, so that forking it is safe. It runs under a
warden, takes orders from its node's agent over one socket, and relays what the ranks report:

    {"order": "start", "tasks": [RankTask, ...]}
    {"order": "tell", "group": ..., "document": {...}}       to every rank of the group
    {"order": "end", "group": ...}

    {"event": "ready", "pid": ..., "loaded": [...]}
    {"event": "report", "group": ..., "rank": ..., "document": {...}}
    {"event": "exit", "group": ..., "rank": ..., "code": ..., "oom_kills": ...,
     "memory_available_bytes": ...}                          of the node, when the group started
    {"event": "ended", "group": ..., "log_tails": {rank: text}, "left": str | null}

One group runs at a time. It is ended in every case by "end": then every process below the zygote
is killed and reaped, daemons that a rank may have left included.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import select
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

from search_spaces.machine import usable_memory_bytes
from workers.errors import RanksLeftError
from workers.forked_rank import ForkedRank, RankEntry, fork_rank
from workers.json_lines import Document, JsonLines
from workers.paced_line import PacedLine
from workers.processes import become_subreaper, end_descendants, reap
from workers.rank_task import RankTask

_END_WITHIN_S: Final = 10.0


class Zygote:
    """The loop that forks ranks and relays their reports.

    Args:
        agent: connection to the node's agent.
        entry: what a forked rank runs.
    """

    def __init__(self, agent: JsonLines, entry: RankEntry) -> None:
        self._agent = agent
        self._events = PacedLine(agent)
        self._entry = entry
        self._group: str | None = None
        self._ranks: list[ForkedRank] = []
        self._oom_kills_before: int | None = None
        self._memory_available_bytes = 0
        self._poll = select.poll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._open = True

    def run(self) -> None:
        """Serves the agent until it, or the warden above, is gone; then ends everything below."""
        self._on_readable(self._agent.socket.fileno(), self._take_orders)
        self._on_readable(os.pidfd_open(os.getppid()), self._stop)
        self._send({"event": "ready", "pid": os.getpid()})
        while self._open:
            for fd, _ in self._poll.poll(self._events.due_in_ms()):
                if fd in self._handlers:  # an earlier handler of this turn may have closed it
                    self._handlers[fd]()
            self._send_held()
        end_descendants()

    def _stop(self) -> None:
        self._open = False

    def _take_orders(self) -> None:
        orders = self._agent.read(block=False)
        if orders is None:
            return self._stop()
        for order in orders:
            match order["order"]:
                case "start":
                    self._start([RankTask.from_mapping(task) for task in order["tasks"]])
                case "tell":
                    self._tell(order["group"], order["document"])
                case "end":
                    self._end(order["group"])
        return None

    def _start(self, tasks: list[RankTask]) -> None:
        assert self._group is None, f"group {self._group} has not been ended"
        end_descendants(deadline_s=_END_WITHIN_S)
        self._group = tasks[0].group
        self._oom_kills_before = _oom_kills()
        self._memory_available_bytes = _memory_available_bytes()
        for task in tasks:
            rank = fork_rank(task, self._entry, close_in_rank=self._handlers)
            self._ranks.append(rank)
            self._on_readable(rank.line.socket.fileno(), partial(self._relay, rank))
            self._on_readable(rank.log.fileno(), partial(self._keep_log, rank))
            self._on_readable(rank.pidfd, self._reap)

    def _tell(self, group: str, document: Document) -> None:
        if group != self._group:
            return
        for rank in self._ranks:
            try:
                rank.line.send(document)
            except OSError:  # it has died; its exit is reported on its own
                continue

    def _end(self, group: str) -> None:
        left = None
        try:
            end_descendants(deadline_s=_END_WITHIN_S, on_reaped=self._note_exit)
        except RanksLeftError as error:
            left = str(error)
        tails = {}
        for rank in self._ranks:
            while rank.log.keep_more():
                pass
            tails[str(rank.task.rank)] = rank.log.tail()
            self._forget(rank)
        self._ranks, self._group = [], None
        self._send({"event": "ended", "group": group, "log_tails": tails, "left": left})

    def _relay(self, rank: ForkedRank) -> None:
        """Passes on what a rank has reported."""
        documents = rank.line.read(block=False)
        if documents is None:
            self._off(rank.line.socket.fileno())
        self._report(rank, documents or [])

    def _report(self, rank: ForkedRank, documents: list[Document]) -> None:
        for document in documents:
            self._send({**rank.name(), "event": "report", "document": document})

    def _keep_log(self, rank: ForkedRank) -> None:
        if not rank.log.keep_more():
            self._off(rank.log.fileno())

    def _reap(self) -> None:
        reap(self._note_exit)

    def _note_exit(self, pid: int, status: int) -> None:
        """Reports a rank's end, after everything that it said before."""
        for rank in self._ranks:
            if rank.pid == pid:
                self._report(rank, rank.line.read_rest())
                self._off(rank.pidfd)
                exited = {
                    "event": "exit",
                    "code": os.waitstatus_to_exitcode(status),
                    "oom_kills": self._oom_kills(),
                    "memory_available_bytes": self._memory_available_bytes,
                }
                self._send({**rank.name(), **exited})

    def _oom_kills(self) -> int | None:
        before, now = self._oom_kills_before, _oom_kills()
        return None if before is None or now is None else now - before

    def _forget(self, rank: ForkedRank) -> None:
        for fd in rank.fds():
            self._off(fd)
        rank.close()

    def _send(self, event: Document) -> None:
        try:
            self._events.send(event)
        except OSError:
            self._stop()

    def _send_held(self) -> None:
        try:
            self._events.flush_if_due()
        except OSError:
            self._stop()

    def _on_readable(self, fd: int, handler: Callable[[], Any]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, select.POLLIN)

    def _off(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)


def _oom_kills() -> int | None:
    """How often the kernel's out-of-memory killer has struck on this machine, in any cgroup.

    None: kernels before 4.13 don't count.
    """
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None


def _memory_available_bytes() -> int:
    """Memory that new processes can have here, a container's limit included."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, usable_memory_bytes())
    return usable_memory_bytes()


def load_entry(name: str) -> RankEntry:
    """Imports "module:function"; the name comes from the zygote's own command line alone."""
    module, _, function = name.partition(":")
    entry: RankEntry = getattr(importlib.import_module(module), function)
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(prog="workers.zygote", description=__doc__)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--entry", default="workers.rank:main")
    arguments = parser.parse_args()
    become_subreaper()
    agent = JsonLines(socket.socket(fileno=arguments.socket))
    agent.socket.set_inheritable(False)
    entry = load_entry(arguments.entry)
    gc.collect()
    gc.freeze()  # what is loaded stays shared between the forks
    Zygote(agent, entry).run()
    sys.exit(0)


if __name__ == "__main__":
    main()

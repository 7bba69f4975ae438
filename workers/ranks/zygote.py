"""The zygote: imports torch and the trainer once, and forks a keeper for each group of ranks.

It is single-threaded and never touches a device, so that forking it is safe. It runs under a
warden, takes orders from its node's agent over one socket, and relays what the keepers report:

    {"order": "start", "tasks": [RankTask, ...]}             one group's ranks on this node
    {"order": "tell", "group": ..., "document": {...}}       to every rank of the group
    {"order": "end", "group": ...}

    {"event": "ready", "pid": ..., "loaded": [...]}
    {"event": "report", "group": ..., "rank": ..., "document": {...}}
    {"event": "exit", "group": ..., "rank": ..., "code": ..., "oom_kills": ...}
        of a rank that the out-of-memory killer may have struck also
        {"memory_available_bytes": ...,                      of the node, when the group started
         "memory_taken_bytes": {rank: ...}}                  at once, of its own, at the most
    {"event": "group_lost", "group": ..., "message": ...}    this group alone can't go on here
    {"event": "ended", "group": ..., "log_tails": {rank: text}, "left": str | null}

Any number of groups run side by side. Each is ended in every case by "end": then every process
below its keeper is killed and reaped, daemons that a rank may have left included. A keeper that
dies, or doesn't end its group in time, loses its group: what it leaves is adopted here, and ended.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Final

from workers.forked_rank import RankEntry
from workers.group_keeper import END_WITHIN_S, GroupKeeper
from workers.json_lines import Document, JsonLines
from workers.orphans import Orphans
from workers.processes import become_subreaper, end_descendants, fork, reap
from workers.rank_task import RankTask
from workers.readers import Readers

_KEEPER_GRACE_S: Final = 3.0
"""A keeper that hasn't answered so long after its own deadline is hung, and killed."""


@dataclass(kw_only=True, slots=True)
class _Keeper:
    """A keeper that has not been reaped."""

    group: str
    pid: int
    pidfd: int
    line: JsonLines
    kill_at: float | None = None
    """When it should have ended its group, on the monotonic clock; None: nobody has asked."""
    ended: Document | None = None
    """Its last word, which is passed on when it has been reaped: then nothing of the group is left."""


class Zygote:
    """The loop that forks keepers and relays what they report.

    Args:
        agent: connection to the node's agent.
        entry: what a forked rank runs.
    """

    def __init__(self, agent: JsonLines, entry: RankEntry) -> None:
        self._agent = agent
        self._entry = entry
        self._keepers: dict[str, _Keeper] = {}
        self._orphans = Orphans(give_up_after_s=END_WITHIN_S)
        self._ends_asked: set[str] = set()
        """Groups whose keepers died, and whose end waits for the orphans'."""
        self._readers = Readers()
        self._open = True

    def run(self) -> None:
        """Serves the agent until it, or the warden above, is gone; then ends everything below."""
        self._readers.add(self._agent.socket.fileno(), self._take_orders)
        self._readers.add(os.pidfd_open(os.getppid()), self._stop)
        self._send({"event": "ready", "pid": os.getpid()})
        while self._open:
            self._readers.handle(self._due_in_ms())
            self._kill_hung_keepers()
            self._tend_orphans()
        end_descendants()

    def _stop(self) -> None:
        self._open = False

    def _due_in_ms(self) -> int | None:
        due = [keeper.kill_at for keeper in self._keepers.values() if keeper.kill_at is not None]
        if self._orphans.next_look_at is not None:
            due.append(self._orphans.next_look_at)
        return max(0, int(1e3 * (min(due) - time.monotonic())) + 1) if due else None

    def _take_orders(self) -> None:
        orders = self._agent.read(block=False)
        if orders is None:
            return self._stop()
        for order in orders:
            match order["order"]:
                case "start":
                    self._start([RankTask.from_mapping(task) for task in order["tasks"]])
                case "tell":
                    self._tell(order["group"], order)
                case "end":
                    self._end(order["group"])
        return None

    def _start(self, tasks: list[RankTask]) -> None:
        group = tasks[0].group
        assert group not in self._keepers, f"group {group} has been started before"
        try:
            keeper = self._fork_keeper(group, tasks)
        except OSError as error:
            message = f"no process could be forked for the group: {error}"
            return self._send({"event": "group_lost", "group": group, "message": message})
        self._keepers[group] = keeper
        self._readers.add(keeper.line.socket.fileno(), partial(self._relay, keeper))
        return self._readers.add(keeper.pidfd, self._reap)

    def _fork_keeper(self, group: str, tasks: list[RankTask]) -> _Keeper:
        ours, theirs = socket.socketpair()
        zygote_pid = os.getpid()

        def be_keeper() -> None:
            for fd in (*self._readers, ours.fileno()):
                os.close(fd)
            line = JsonLines(theirs)
            GroupKeeper(line, zygote_pid=zygote_pid, tasks=tasks, entry=self._entry).run()

        try:
            pid = fork(be_keeper)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return _Keeper(group=group, pid=pid, pidfd=os.pidfd_open(pid), line=JsonLines(ours))

    def _tell(self, group: str, order: Document) -> None:
        keeper = self._keepers.get(group)
        if keeper is None:
            return
        try:
            keeper.line.send(order)
        except OSError:  # it has died; that is reported on its own
            return

    def _end(self, group: str) -> None:
        keeper = self._keepers.get(group)
        if keeper is not None:
            keeper.kill_at = time.monotonic() + END_WITHIN_S + _KEEPER_GRACE_S
            self._tell(group, {"order": "end"})
        elif self._orphans.looked_for:
            self._ends_asked.add(group)
        else:
            self._send_ended(group, left=None)

    def _send_ended(self, group: str, *, left: str | None) -> None:
        self._send({"event": "ended", "group": group, "log_tails": {}, "left": left})

    def _relay(self, keeper: _Keeper) -> None:
        """Passes on what a keeper says of its ranks."""
        documents = keeper.line.read(block=False)
        if documents is None:
            self._readers.remove(keeper.line.socket.fileno())
        self._pass_on(keeper, documents or [])

    def _pass_on(self, keeper: _Keeper, documents: list[Document]) -> None:
        if documents and documents[-1]["event"] == "ended":
            keeper.ended = documents.pop()
        if documents:
            self._send(*documents)

    def _reap(self) -> None:
        reap(self._note_exit)

    def _note_exit(self, pid: int, status: int, _peak_rss_bytes: int) -> None:
        """Forgets a keeper; one that had not ended its group has lost it."""
        keeper = next((one for one in self._keepers.values() if one.pid == pid), None)
        if keeper is None:
            return None
        self._pass_on(keeper, keeper.line.read_rest())
        del self._keepers[keeper.group]
        for fd in (keeper.line.socket.fileno(), keeper.pidfd):
            self._readers.remove(fd)
        keeper.line.close()
        os.close(keeper.pidfd)
        if keeper.ended is None or keeper.ended["left"] is not None:
            self._orphans.look()
        if keeper.ended is not None:
            return self._send(keeper.ended)
        code = os.waitstatus_to_exitcode(status)
        message = f"the keeper of the group's ranks ended with exit code {code}"
        self._send({"event": "group_lost", "group": keeper.group, "message": message})
        if keeper.kill_at is not None:
            self._ends_asked.add(keeper.group)
        return None

    def _kill_hung_keepers(self) -> None:
        for keeper in self._keepers.values():
            if keeper.kill_at is not None and time.monotonic() >= keeper.kill_at:
                os.kill(keeper.pid, signal.SIGKILL)  # not reaped, so it is it
                keeper.kill_at += _KEEPER_GRACE_S  # one that can't die must not cost a core

    def _tend_orphans(self) -> None:
        """Ends what dead keepers left, and then tells so those who wait for it."""
        self._orphans.tend(
            keepers=[keeper.pid for keeper in self._keepers.values()], on_reaped=self._note_exit
        )
        if self._orphans.looked_for and self._orphans.problem is None:
            return
        for group in self._ends_asked:
            self._send_ended(group, left=self._orphans.problem)
        self._ends_asked.clear()

    def _send(self, *events: Document) -> None:
        try:
            self._agent.send(*events)
        except OSError:
            self._stop()


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

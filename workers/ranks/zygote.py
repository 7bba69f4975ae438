"""The zygote: imports torch and the trainer once, and forks a keeper for each group of ranks.

It has one thread and never uses a device, so that forking it is safe. It runs under a warden,
receives orders from its node's agent over one socket, and passes on the events of the keepers:

    {"order": "start", "tasks": [RankTask, ...]}             one group's ranks on this node
    {"order": "tell", "group": ..., "document": {...}}       to every rank of the group
    {"order": "end", "group": ...}

    {"event": "ready", "pid": ..., "loaded": [...]}
    {"event": "report", "group": ..., "rank": ..., "document": {...}}
    {"event": "exit", "group": ..., "rank": ..., "code": ..., "oom_kills": ...}
        of a rank that the out-of-memory killer may have struck also
        {"memory_available_bytes": ...,                      of the node, when the group started
         "memory_taken_bytes": {rank: ...}}                  at once, of its own, at the most
    {"event": "group_lost", "group": ..., "message": ...}    only this group can't go on here
    {"event": "ended", "group": ..., "log_tails": {rank: text}, "left": str | null}

Any number of groups run side by side. The order "end" ends each in every case: every process below
its keeper is killed and reaped, including daemons of ranks. Where a keeper dies, or does not end
its group in time, the zygote adopts the remaining processes of the group and ends them.
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
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

from workers.backoff import Backoff
from workers.ranks.fd_loop import Readers
from workers.ranks.forked_rank import RankEntry
from workers.ranks.json_lines import Document, JsonLines
from workers.ranks.keeper import END_WITHIN_S, GroupKeeper
from workers.ranks.processes import (
    OnReaped,
    become_subreaper,
    children,
    end_descendants,
    fork,
    kill,
    live_without_parent,
    reap,
)
from workers.ranks.rank_task import RankTask
from workers.ranks.scratch import remove_directories

_FIRST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.02
_PAUSE_ONCE_GIVEN_UP_S: Final = 1.0
"""Pauses between two looks for orphans."""

_KEEPER_GRACE_S: Final = 3.0
"""How long after its own time limit a keeper that has not answered is killed."""


class Orphans:
    """Ends all children of the zygote except its keepers, in short steps that do not block.

    Every living process below a dead keeper is a child of the zygote or has an ancestor that is,
    and no child disappears before it is reaped here. So one look that finds none proves that none
    is left.

    Args:
        give_up_after_s: seconds after which there is a `problem`; the attempts go on.
    """

    def __init__(self, *, give_up_after_s: float) -> None:
        self._give_up_after_s = give_up_after_s
        self._since = 0.0
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self.next_look_at: float | None = None
        """On the monotonic clock; None: there are no orphans."""
        self.problem: str | None = None
        """The processes that could not be ended in time; None: there are none."""

    @property
    def looked_for(self) -> bool:
        """Whether there may be orphans."""
        return self.next_look_at is not None

    def look(self) -> None:
        """Begins to look for orphans, since a keeper has died."""
        self._since = self.next_look_at = time.monotonic()
        self._backoff.reset()
        self.problem = None

    def tend(self, *, keepers: Collection[int], on_reaped: OnReaped) -> None:
        """Kills and reaps orphans, where the next look is due.

        Args:
            keepers: pids of the children that are not orphans.
            on_reaped: called for each child that was reaped, also for keepers.
        """
        now = time.monotonic()
        if self.next_look_at is None or now < self.next_look_at:
            return
        found = set(children()) - set(keepers)
        if not found:
            self.next_look_at = self.problem = None
            return
        self.next_look_at = now + self._backoff.take()
        if now > self._since + self._give_up_after_s:
            self.problem = (
                f"processes {sorted(found)} are still there {self._give_up_after_s:g} s after they "
                "were killed; look for a hung device or file system on this node"
            )
            self.next_look_at = now + _PAUSE_ONCE_GIVEN_UP_S
        kill(found)
        reap(on_reaped)


@dataclass(kw_only=True, slots=True)
class _Keeper:
    """A keeper that has not been reaped."""

    task: RankTask
    """The first rank of its group here."""
    pid: int
    pidfd: int
    line: JsonLines
    kill_at: float | None = None
    """When it must have ended its group, on the monotonic clock; None: it was not ordered to."""
    ended: Document | None = None
    """Its event "ended", which is passed on when it has been reaped: then the group has ended."""

    @property
    def group(self) -> str:
        return self.task.group


class Zygote:
    """The loop that forks keepers and passes on their events.

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
        """Groups whose keepers died, and whose end waits until their orphans have ended."""
        self._directories_left: list[RankTask] = []
        """One task of each group whose keeper died before it could remove its directories."""
        self._readers = Readers()
        self._open = True

    def run(self) -> None:
        """Serves the agent until it or the warden ends; then ends all processes below."""
        self._readers.add(self._agent.socket.fileno(), self._take_orders)
        self._readers.add(os.pidfd_open(os.getppid()), self._stop)
        live_without_parent()  # its pidfd reports the warden's end, and all below ends first
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
            keeper = self._fork_keeper(tasks)
        except OSError as error:
            message = f"no process could be forked for the group: {error}"
            return self._send({"event": "group_lost", "group": group, "message": message})
        self._keepers[group] = keeper
        self._readers.add(keeper.line.socket.fileno(), partial(self._relay, keeper))
        return self._readers.add(keeper.pidfd, self._reap)

    def _fork_keeper(self, tasks: list[RankTask]) -> _Keeper:
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
        return _Keeper(task=tasks[0], pid=pid, pidfd=os.pidfd_open(pid), line=JsonLines(ours))

    def _tell(self, group: str, order: Document) -> None:
        keeper = self._keepers.get(group)
        if keeper is None:
            return
        with suppress(OSError):  # it has ended; that is a separate event
            keeper.line.send(order)

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
        """Passes on the events of a keeper."""
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
        """Removes a reaped keeper; reports the loss of its group where it had not ended it."""
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
        self._directories_left.append(keeper.task)
        code = os.waitstatus_to_exitcode(status)
        message = f"the keeper of the group's ranks ended with exit code {code}"
        self._send({"event": "group_lost", "group": keeper.group, "message": message})
        if keeper.kill_at is not None:
            self._ends_asked.add(keeper.group)
        return None

    def _kill_hung_keepers(self) -> None:
        for keeper in self._keepers.values():
            if keeper.kill_at is not None and time.monotonic() >= keeper.kill_at:
                os.kill(keeper.pid, signal.SIGKILL)  # it is not reaped, so the pid is still its own
                # A keeper that can't be killed must not keep a core busy.
                keeper.kill_at += _KEEPER_GRACE_S

    def _tend_orphans(self) -> None:
        """Ends the processes of dead keepers, and then reports the end of their groups."""
        self._orphans.tend(
            keepers=[keeper.pid for keeper in self._keepers.values()], on_reaped=self._note_exit
        )
        if self._orphans.looked_for and self._orphans.problem is None:
            return
        for task in self._directories_left:
            remove_directories(task)
        self._directories_left.clear()
        for group in self._ends_asked:
            self._send_ended(group, left=self._orphans.problem)
        self._ends_asked.clear()

    def _send(self, *events: Document) -> None:
        try:
            self._agent.send(*events)
        except OSError:
            self._stop()


def load_entry(name: str) -> RankEntry:
    """Imports "module:function"; the name comes only from the zygote's own command line."""
    module, _, function = name.partition(":")
    entry: RankEntry = getattr(importlib.import_module(module), function)
    return entry


def main() -> None:
    parser = argparse.ArgumentParser(prog="workers.ranks.zygote", description=__doc__)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--entry", default="workers.rank_jobs.rank:main")
    arguments = parser.parse_args()
    become_subreaper()
    agent = JsonLines(socket.socket(fileno=arguments.socket))
    agent.socket.set_inheritable(False)
    entry = load_entry(arguments.entry)
    gc.collect()
    gc.freeze()  # so that the forks share the loaded modules
    Zygote(agent, entry).run()
    sys.exit(0)


if __name__ == "__main__":
    main()

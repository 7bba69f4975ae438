"""The zygote: a warden starts it; it imports torch once and forks a keeper for each group of ranks.

It has one thread and never uses a device, so that forking it is safe. The warden ends it; the agent
of the node, which gives it orders over one socket, watches the deadlines. What keepers and ranks
report does not pass through it.

    {"order": "lines"}        carries the ends of lines to the agent for the next group
    {"order": "start", "tasks": [RankTask, ...]}             one group's ranks on this node
    {"order": "kill", "group": ...}                          a keeper that does not end its group

    {"event": "ready", "pid": ...}
    {"event": "group_lost", "group": ..., "message": ...}    only this group can't go on here
    {"event": "gone", "group": ...}                          its keeper, and all below

Any number of groups run side by side. Where a keeper dies, or is killed since it does not end its
group in time, the zygote adopts the remaining processes of the group and ends them.
"""

from __future__ import annotations

import argparse
import errno
import gc
import os
import pkgutil
import signal
import socket
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from layout_tuner.protocol.connection.backoff import Backoff
from layout_tuner.workers.ranks.forked_rank import RankEntry
from layout_tuner.workers.ranks.json_lines import Document, JsonLines, Readers
from layout_tuner.workers.ranks.keeper import GroupKeeper
from layout_tuner.workers.ranks.processes import (
    OnReaped,
    become_subreaper,
    children,
    end_descendants,
    fork,
    kill,
    live_without_parent,
    reap,
)
from layout_tuner.workers.ranks.rank_task import RankTask
from layout_tuner.workers.ranks.scratch import remove_directories

_KEEPERS_WITHIN_S: Final = 3.0
"""Seconds that keepers may take to end their groups when the zygote ends, before it kills them."""


class Orphans:
    """Ends all children of the zygote except its keepers, in short steps that do not block.

    Every living process below a dead keeper is a child of the zygote or has an ancestor that is,
    and no child disappears before it is reaped here. So one look that finds none proves that none
    is left.
    """

    def __init__(self) -> None:
        self._backoff = Backoff(0.001, 1.0)  # between two looks
        self.next_look_at: float | None = None
        """On the monotonic clock; None: there are no orphans."""

    def look(self) -> None:
        """Begins to look for orphans, since a keeper has died."""
        self.next_look_at = time.monotonic()
        self._backoff.reset()

    def tend(self, *, keepers: Collection[int], on_reaped: OnReaped) -> None:
        """Kills and reaps orphans, where the next look is due.

        Keepers are the children that are not orphans; `on_reaped` is called for them, too.
        """
        now = time.monotonic()
        if self.next_look_at is None or now < self.next_look_at:
            return
        if found := set(children()) - set(keepers):
            self.next_look_at = now + self._backoff.take()
            kill(found)
            reap(on_reaped)
        else:
            self.next_look_at = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Keeper:
    """A keeper that has not been reaped."""

    task: RankTask
    """The first rank of its group here."""
    pid: int
    pidfd: int


class Zygote:
    """The loop that forks keepers and reaps them."""

    def __init__(self, agent: JsonLines, entry: RankEntry) -> None:
        self._agent = agent
        self._entry = entry
        self._line_fds: list[int] = []
        """Lines of the group that is ordered next."""
        self._keepers: dict[str, _Keeper] = {}
        self._orphans = Orphans()
        self._unclean: list[_Keeper] = []
        """Keepers that have died, and whose groups are gone when all orphans have ended."""
        self._readers = Readers()
        self._warden = os.pidfd_open(os.getppid())
        self._stopped, self._running = os.pipe()
        """Keepers have the first end; it is closed when the zygote closes the second, or ends."""
        self._open = True

    def run(self) -> None:
        """Serves the agent until it or the warden ends; then ends all processes below."""
        self._readers.add(self._agent.socket.fileno(), self._take_orders)
        self._readers.add(self._warden, self._stop)
        live_without_parent()  # its pidfd reports the warden's end, and all below ends first
        self._send({"event": "ready", "pid": os.getpid()})
        while self._open:
            self._readers.handle(self._orphans.next_look_at)
            self._tend_orphans()
        self._end_keepers()
        end_descendants()

    def _stop(self) -> None:
        self._open = False
        self._readers.remove(self._agent.socket.fileno())
        self._readers.remove(self._warden)

    def _end_keepers(self) -> None:
        """Has each keeper end its group.

        A daemon whose keeper had been killed would be left if the zygote were killed, too, before
        it ended that daemon.
        """
        os.close(self._running)
        give_up_at = time.monotonic() + _KEEPERS_WITHIN_S
        while self._keepers and time.monotonic() < give_up_at:
            self._readers.handle(give_up_at)

    def _take_orders(self) -> None:
        orders = self._agent.read(block=False)
        if orders is None:
            return self._stop()
        for order in orders:
            match order["order"]:
                case "lines":
                    self._line_fds += self._agent.take_fds()
                case "start":
                    self._start([RankTask.from_mapping(task) for task in order["tasks"]])
                case "kill" if keeper := self._keepers.get(order["group"]):
                    os.kill(keeper.pid, signal.SIGKILL)  # not reaped, so the pid is still its own
        return None

    def _start(self, tasks: list[RankTask]) -> None:
        group = tasks[0].group
        line_fds, self._line_fds = self._line_fds, []
        try:
            if len(line_fds) <= len(tasks):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            keeper = self._keepers[group] = self._fork_keeper(tasks, line_fds)
        except OSError as error:
            self._send_loss(group, f"no process could be forked for the group: {error}")
            self._send_gone(group)
        else:
            self._readers.add(keeper.pidfd, self._reap)
        finally:
            for fd in line_fds:
                os.close(fd)

    def _fork_keeper(self, tasks: list[RankTask], line_fds: Sequence[int]) -> _Keeper:
        def be_keeper() -> None:
            for fd in (*self._readers, *self._agent.fds, self._running):
                os.close(fd)
            GroupKeeper(
                agent=JsonLines(socket.socket(fileno=line_fds[0])),
                zygote_stopped=self._stopped,
                tasks=tasks,
                line_fds=list(line_fds[1:]),
                entry=self._entry,
            ).run()

        pid = fork(be_keeper)
        return _Keeper(task=tasks[0], pid=pid, pidfd=os.pidfd_open(pid))

    def _reap(self) -> None:
        reap(self._note_exit)

    def _note_exit(self, pid: int, status: int, _peak_rss_bytes: int) -> None:
        """Removes a reaped keeper; reports the loss of its group where it had not ended it."""
        keeper = next((one for one in self._keepers.values() if one.pid == pid), None)
        if keeper is None:
            return None
        group = keeper.task.group
        del self._keepers[group]
        self._readers.remove(keeper.pidfd)
        os.close(keeper.pidfd)
        if (code := os.waitstatus_to_exitcode(status)) == 0:
            return self._send_gone(group)
        self._orphans.look()
        self._unclean.append(keeper)
        return self._send_loss(
            group, f"the keeper of the group's ranks ended with exit code {code}"
        )

    def _tend_orphans(self) -> None:
        """Ends the processes of dead keepers, and then reports that their groups are gone."""
        self._orphans.tend(
            keepers=[keeper.pid for keeper in self._keepers.values()], on_reaped=self._note_exit
        )
        if self._orphans.next_look_at is None:
            for keeper in self._unclean:
                remove_directories(keeper.task)
                self._send_gone(keeper.task.group)
            self._unclean.clear()

    def _send_loss(self, group: str, message: str) -> None:
        self._send({"event": "group_lost", "group": group, "message": message})

    def _send_gone(self, group: str) -> None:
        self._send({"event": "gone", "group": group})

    def _send(self, event: Document) -> None:
        try:
            self._agent.send(event)
        except OSError:
            self._stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="layout_tuner.workers.ranks.zygote", description=__doc__)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--entry", default="layout_tuner.workers.rank_jobs.rank:main")
    arguments = parser.parse_args()
    become_subreaper()
    agent = JsonLines(socket.socket(fileno=arguments.socket))
    agent.socket.set_inheritable(False)
    entry: RankEntry = pkgutil.resolve_name(arguments.entry)  # imports "module:function"
    gc.collect()
    gc.freeze()  # so that the forks share the loaded modules
    Zygote(agent, entry).run()
    sys.exit(0)


if __name__ == "__main__":
    main()

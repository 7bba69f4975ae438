"""One node of a Slurm step: runs the node's ranks on orders of a launcher on another host.

`srun` starts this task on each node of a group. It connects to the launcher, greets it, and then
serves it as a node agent serves Ray: the same orders and the same events, one JSON document a line.
The launcher's address and the step's token are in the environment, since every user of a node can
read command lines.

    {"order": "start", "tasks": [RankTask, ...]}, "tell" and "end" as the zygote takes them

    {"event": "hello", "token": ..., "name": ..., "step": ..., "num_cores": ...,
     "core_ids": [...], "memory_available_bytes": ..., "steps": [...]}
    {"event": "started", "pids": {...}}       the zygote is ready, the ranks are being forked
    {"event": "ended", "group": ..., "log_tails": {rank: text}, "left": str | null}
    {"event": "lost", "message": ...}         the zygote has ended
    and the reports of the ranks, as the zygote sends them

It ends all processes on its node when the connection closes, and the kernel ends it with its
parent, Slurm's manager of the step. If either of the two is killed, the warden ends the processes
below.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from search_spaces.machine import available_memory_bytes, usable_cores
from workers.errors import NodeLostError, WorkerError
from workers.ranks.json_lines import Document, JsonLines
from workers.ranks.node_ranks import NodeRanks
from workers.ranks.processes import die_with_parent
from workers.ranks.rank_task import RANK_ENTRY, RankTask

ADDRESS_VARIABLE: Final = "LAYOUT_TUNER_STEP_ADDRESS"
"""Where the launcher listens, as HOST:PORT."""
TOKEN_VARIABLE: Final = "LAYOUT_TUNER_STEP_TOKEN"  # noqa: S105 (a name)
"""The token that the step sends to be accepted."""

STEP_VARIABLE: Final = "LAYOUT_TUNER_STEP"
"""Name of the step, in the environment of all of its processes."""

_CONNECT_WITHIN_S: Final = 30.0
_POLL_S: Final = 60.0
_SILENT_S: Final = 5
"""Seconds without a packet after which TCP probes the other end."""
_ASK_EVERY_S: Final = 3
_ASK_TIMES: Final = 5
_NODE_VARIABLE: Final = "SLURMD_NODENAME"


def notice_a_dead_peer(connection: socket.socket) -> None:
    """Makes the kernel close a connection within 20 s after the other host ends or is cut off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASK_TIMES)
    unheard_ms = 1000 * (_SILENT_S + _ASK_EVERY_S * _ASK_TIMES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unheard_ms)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


class StepNode:
    """Serves one launcher and one group, until either ends.

    Args:
        line: to the launcher.
        rank_entry: "module:function" that a rank runs.
    """

    def __init__(self, line: JsonLines, rank_entry: str) -> None:
        self._line = line
        self._rank_entry = rank_entry
        self._sending = threading.Lock()
        self._ranks: NodeRanks | None = None

    def run(self) -> None:
        """Carries out orders until the connection closes; then no process is left below."""
        try:
            while (order := self._line.receive()) is not None:
                self._take(order)
        except OSError:  # the launcher's host has ended or is cut off
            pass
        finally:
            if self._ranks is not None:
                self._ranks.close()

    def _take(self, order: Document) -> None:
        try:
            match order["order"]:
                case "start":
                    self._start([RankTask.from_mapping(task) for task in order["tasks"]])
                case "tell":
                    self._running().tell(order["group"], order["document"])
                case "end":
                    self._end(order["group"])
        except NodeLostError as error:
            self._send({"event": "lost", "message": str(error)})

    def _start(self, tasks: list[RankTask]) -> None:
        self._ranks = NodeRanks(other_guardians=[os.getppid()], rank_entry=self._rank_entry)
        self._ranks.start(tasks)  # the zygote reads the order when it is ready
        threading.Thread(target=self._relay, args=[self._ranks], daemon=True).start()

    def _relay(self, ranks: NodeRanks) -> None:
        """Passes events of the ranks on, until the zygote has ended."""
        try:
            ranks.wait_until_ready()
            self._send({"event": "started", "pids": {"agent": os.getpid(), **ranks.pids}})
        except NodeLostError as error:
            return self._send({"event": "lost", "message": str(error)})
        while True:
            events = ranks.poll(_POLL_S)
            self._send(*events)
            if events and events[-1]["event"] == "lost":
                return None

    def _end(self, group: str) -> None:
        ended: Document = {"event": "ended", "group": group, "log_tails": {}, "left": None}
        try:
            ended["log_tails"] = {str(r): tail for r, tail in self._running().end(group).items()}
        except NodeLostError:
            raise
        except WorkerError as error:
            ended["left"] = str(error)
        self._send(ended)

    def _running(self) -> NodeRanks:
        if self._ranks is None:
            raise NodeLostError("the launcher sent an order before it started a rank")
        return self._ranks

    def _send(self, *documents: Document) -> None:
        with suppress(OSError), self._sending:  # `run` sees the line closed
            self._line.send(*documents)


def hello(token: str, *, look: bool) -> Document:
    """The greeting: the node's name, its cores and memory in this step, and other living steps."""
    job, step = (os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return {
        "event": "hello",
        "token": token,
        "name": os.environ.get(_NODE_VARIABLE) or socket.gethostname(),
        "step": f"{job}.{step}",
        "pid": os.getpid(),
        "num_cores": usable_cores(),
        "core_ids": sorted(os.sched_getaffinity(0)),
        "memory_available_bytes": available_memory_bytes(),
        "steps": living_steps(os.environ) if look else [],
    }


def living_steps(environment: Mapping[str, str]) -> list[str]:
    """Names of other steps of this job that have processes on this node.

    All processes of a step have its name in their environment, also those whose parents have ended.
    """
    ours = {name: environment.get(name, "") for name in ("SLURM_JOB_ID", _NODE_VARIABLE)}
    found = set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # the process ended meanwhile, or belongs to another user
            continue
        theirs = dict(word.partition("=")[::2] for word in words)
        if STEP_VARIABLE in theirs and all(theirs.get(name, "") == ours[name] for name in ours):
            found.add(theirs[STEP_VARIABLE])
    return sorted(found - {environment.get(STEP_VARIABLE)})


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="workers.launchers.slurm_step.step_node", description=__doc__
    )
    parser.add_argument("--entry", default=RANK_ENTRY)
    parser.add_argument("--look", action="store_true", help="report other steps on this node")
    arguments = parser.parse_args()
    die_with_parent(os.getppid())
    host, _, port = os.environ.pop(ADDRESS_VARIABLE).rpartition(":")
    token = os.environ.pop(TOKEN_VARIABLE)
    connection = socket.create_connection((host, int(port)), _CONNECT_WITHIN_S)
    connection.settimeout(None)
    notice_a_dead_peer(connection)
    line = JsonLines(connection)
    line.send(hello(token, look=arguments.look))
    StepNode(line, arguments.entry).run()


if __name__ == "__main__":
    main()

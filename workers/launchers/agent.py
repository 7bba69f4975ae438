"""The agent of a node: runs the node's ranks on orders of a launcher on another host.

Ray or `srun` starts it on each node. It connects to the launcher, greets it with the launcher's
token, and serves it until the connection closes: one JSON document a line. The address and the
token come in the environment or from Ray, since every user of a node can read command lines.

    {"order": "start", "tasks": [RankTask, ...]}             one group's ranks on this node
    {"order": "tell", "group": ..., "document": {...}}       to every rank of the group
    {"order": "end", "group": ...}

    {"event": "hello", "token": ..., "name": ..., "pid": ..., "num_cores": ..., "core_ids": [...],
     "switches": [...], ...}
    {"event": "ready", "pids": {...}}         the zygote is ready: ranks can be forked at once
    {"event": "report", "group": ..., "rank": ..., "document": {...}}
    {"event": "exit" or "group_lost", "group": ..., ...}     as the keeper sends them
    {"event": "ended", "group": ..., "log_tails": {rank: text}, "left": str | null}
    {"event": "lost", "message": ...}         the zygote has ended
    {"event": "alive"}                        every five seconds: this process runs

It ends all processes on its node when the connection closes, and the kernel ends it with its
parent, the raylet or Slurm's manager of the step. If either of the two is killed, the warden ends
the processes below.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from layout_tuner.process_resources import usable_cores
from layout_tuner.workers.errors import NodeLostError, RanksLeftError, WorkerError
from layout_tuner.workers.ranks.json_lines import Document, JsonLines
from layout_tuner.workers.ranks.rank_task import RankTask
from layout_tuner.workers.ranks.zygote_client import ZygoteClient

ADDRESS_VARIABLE: Final = "LAYOUT_TUNER_LAUNCHER_ADDRESS"
"""Where the launcher listens, as HOST:PORT."""
TOKEN_VARIABLE: Final = "LAYOUT_TUNER_LAUNCHER_TOKEN"  # noqa: S105 (a name)
"""The token with which agents greet the launcher."""

ALIVE_EVERY_S: Final = 5.0
_CONNECT_WITHIN_S: Final = 30.0
_POLL_S: Final = 60.0
_SILENT_S: Final = 5
"""Seconds without a packet after which TCP probes the other end."""
_ASK_EVERY_S: Final = 3
_ASK_TIMES: Final = 5


def notice_a_dead_peer(connection: socket.socket) -> None:
    """Makes the kernel close a connection within 20 s after the other host ends or is cut off."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASK_TIMES)
    unheard_ms = 1000 * (_SILENT_S + _ASK_EVERY_S * _ASK_TIMES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unheard_ms)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def greet(address: str, token: str, fields: Document) -> JsonLines:
    """Connects to the launcher, greets it, and sends it a sign of life now and then.

    Args:
        address: where it listens, as HOST:PORT.
        token: what proves that this is its agent.
        fields: of the greeting, beside those of every node.

    Raises:
        OSError: it can't be reached.
    """
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), _CONNECT_WITHIN_S)
    connection.settimeout(None)
    notice_a_dead_peer(connection)
    line = JsonLines(connection)
    line.send(
        {
            "event": "hello",
            "token": token,
            "name": socket.gethostname(),
            "pid": os.getpid(),
            "num_cores": usable_cores(),
            "core_ids": sorted(os.sched_getaffinity(0)),
            "switches": switches_above(os.environ),
            **fields,
        }
    )
    threading.Thread(target=_stay_alive, args=[line], daemon=True).start()
    return line


def switches_above(environment: Mapping[str, str]) -> list[str]:
    """Slurm's switches or block above this node, the lowest first; none outside of a step.

    SLURM_TOPOLOGY_ADDR is "root.leaf1.n1" below switches and "block1.n1" in a block (sbatch(1);
    the block plugin's topology_p_get_node_addr). A name with a dot in it can't be told apart.
    """
    address, pattern = (
        environment.get(f"SLURM_TOPOLOGY_ADDR{end}", "").split(".") for end in ("", "_PATTERN")
    )
    return address[-2::-1] if len(address) == len(pattern) and pattern[-1] == "node" else []


def _stay_alive(line: JsonLines) -> None:
    with suppress(OSError):  # who reads the line sees it closed
        while True:
            time.sleep(ALIVE_EVERY_S)
            line.send({"event": "alive"})


def log_tails(ended: Mapping[int, Document]) -> dict[int, str]:
    """The log tails by rank, from the event "ended" of each node; RanksLeftError if some are."""
    tails: dict[int, str] = {}
    for node, document in ended.items():
        if document["left"]:
            raise RanksLeftError(document["left"], node=node)
        tails.update({int(rank): tail for rank, tail in document["log_tails"].items()})
    return tails


class NodeAgent:
    """Serves one launcher, until its line closes."""

    def __init__(self, line: JsonLines, rank_entry: str) -> None:
        self._line = line
        self._ranks = ZygoteClient(other_guardians=[os.getppid()], rank_entry=rank_entry)

    def run(self) -> None:
        """Carries out orders until the connection closes; then no process is left below."""
        threading.Thread(target=self._relay, daemon=True).start()
        try:
            while (order := self._line.receive()) is not None:
                self._take(order)
        except OSError:  # the launcher's host has ended or is cut off
            pass
        finally:
            self._ranks.close()

    def _take(self, order: Document) -> None:
        match order["order"]:
            case "start":
                with suppress(NodeLostError):  # `_relay` sends that
                    self._ranks.start([RankTask.from_mapping(task) for task in order["tasks"]])
            case "tell":
                self._ranks.tell(order["group"], order["document"])
            case "end":  # groups end side by side
                threading.Thread(target=self._end, args=[order["group"]], daemon=True).start()

    def _relay(self) -> None:
        """Sends the events of the ranks, until the zygote has ended."""
        try:
            self._ranks.wait_until_ready()
            self._send({"event": "ready", "pids": {"agent": os.getpid(), **self._ranks.pids}})
        except NodeLostError as error:
            return self._send({"event": "lost", "message": str(error)})
        while True:
            events = self._ranks.poll(_POLL_S)
            self._send(*events)
            if events and events[-1]["event"] == "lost":
                return None

    def _end(self, group: str) -> None:
        ended: Document = {"event": "ended", "group": group, "log_tails": {}, "left": None}
        try:
            ended["log_tails"] = {str(r): tail for r, tail in self._ranks.end(group).items()}
        except NodeLostError:
            return  # `_relay` sends that
        except WorkerError as error:
            ended["left"] = str(error)
        self._send(ended)

    def _send(self, *documents: Document) -> None:
        with suppress(OSError):  # `run` sees the line closed
            self._line.send(*documents)

"""The bridge to Ray: a process that joins the cluster for a worker and has an agent on each node.

Ray ends a process that uses it when the head does not answer for long, when a raylet dies at
certain moments, and when the process joins a second time. So Ray is used by this process, below a
warden, and not by the worker, which starts it again when it ends. They communicate over one socket:

    {"order": "call", "id": ..., "node": ..., "method": ..., "arguments": [...]}   to its agent
    {"order": "replace", "node": ...}                      ends the node's agent and starts another

    {"event": "joined", "node": ..., "name": ..., "address": ..., "description": {...}}
    {"event": "news", "node": ..., "documents": [...]}     as the node's zygote sent them
    {"event": "answer", "id": ..., "value": ...}
    {"event": "failed", "id": ..., "left": bool, "message": ...}   left: ranks that can't be ended
    {"event": "lost", "node": ..., "message": ...}
    {"event": "unusable", "message": ...}                  the cluster; this process ends

A node's key is Ray's own id, which changes when Ray is started again on the node.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final

from workers.errors import RanksLeftError, RayClusterFailedError
from workers.launchers.ray.cluster import JoinedRay, LocalRay, RayCluster, prepare_environment
from workers.launchers.ray.node_agent import NodeAgent
from workers.ranks.json_lines import Document, JsonLines
from workers.ranks.node_ranks import START_WITHIN_S

prepare_environment()

import ray  # noqa: E402 (it reads the environment while it is imported)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

_POLL_S: Final = 5.0
_SILENT_AFTER_S: Final = 15.0
"""An agent answers each poll within `_POLL_S`; after this time in addition it counts as lost."""

_TICK_S: Final = 1.0
_LOOK_S: Final = 1.0
_CLUSTER_LOOK_S: Final = 0.25
_MOST_OF_THE_TIME: Final = 0.05
"""Most time of a core that listing the members of a large cluster may take."""

_GIVE_UP_WITHIN_S: Final = 2.0

_RETRY_S: Final = 10.0
_CLOSE_WITHIN_S: Final = 10.0
_AGENT_THREADS: Final = 64
"""Calls at the same time: the groups of a node start and end side by side."""


class Bridge:
    """Follows the cluster's nodes, and passes calls to their agents and events to the worker.

    One thread does all steps in the order of arrival; other threads put orders, members and answers
    into its queue. The only step that is slower with more nodes is listing the members.

    Args:
        worker: connection to the worker.
        cluster: the cluster, which has been joined.
        rank_entry: "module:function" that a rank runs.
    """

    def __init__(self, worker: JsonLines, cluster: RayCluster, rank_entry: str) -> None:
        self._worker = worker
        self._cluster = cluster
        self._rank_entry = rank_entry
        self._todo: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._members: dict[str, Mapping[str, Any]] = {}
        self._agents: dict[str, Any] = {}
        self._ready: set[str] = set()
        self._start_due: dict[str, float] = {}  # the oldest is first, in this one and the next
        self._answer_due: dict[str, float] = {}
        self._retry_at: dict[str, float] = {}
        self._open = True
        self._cluster_is_there = True

    def run(self) -> bool:
        """Serves the worker until it or the cluster ends; returns whether the cluster runs."""
        for target in (self._take_orders, self._watch_members, self._watch_cluster):
            run = partial(self._run_or_give_up, target)
            threading.Thread(target=run, name=target.__name__, daemon=True).start()
        while self._open:
            with contextlib.suppress(queue.Empty):
                self._todo.get(timeout=_TICK_S)()
            self._lose_the_silent()
        if self._cluster_is_there and self._agents:
            self._close_agents()
        return self._cluster_is_there

    def _close_agents(self) -> None:
        """Has the agents end the processes below them, and waits for their answers."""
        closed = [agent.close.remote() for agent in self._agents.values()]
        ray.wait(closed, num_returns=len(closed), timeout=_CLOSE_WITHIN_S)

    def _run_or_give_up(self, target: Callable[[], None]) -> None:
        """Runs a thread's function; ends the bridge where it fails, and the worker restarts it."""
        try:
            target()
        except Exception as error:
            traceback.print_exc()
            self._todo.put(partial(self._give_up, f"{target.__name__} failed: {first_line(error)}"))

    def _take_orders(self) -> None:
        while (orders := self._worker.read(block=True)) is not None:
            for order in orders:
                self._todo.put(partial(self._take_order, order))
        self._todo.put(self._stop)

    def _watch_members(self) -> None:
        while True:
            started = time.monotonic()
            alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
            self._todo.put(partial(self._take_members, alive))
            took_s = time.monotonic() - started
            time.sleep(max(_LOOK_S, took_s / _MOST_OF_THE_TIME))

    def _watch_cluster(self) -> None:
        """Watches for the end of the cluster, without calls to Ray, before it can be restarted."""
        while not self._cluster.has_ended():
            time.sleep(_CLUSTER_LOOK_S)
        self._todo.put(partial(self._give_up, "the Ray cluster ended by itself"))
        # A call to Ray that is under way would wait for the head without a limit.
        time.sleep(_GIVE_UP_WITHIN_S)
        os._exit(1)

    def _stop(self) -> None:
        self._open = False

    def _give_up(self, why: str) -> None:
        self._send({"event": "unusable", "message": why})
        self._cluster_is_there = False
        self._stop()

    def _take_members(self, alive: Sequence[Mapping[str, Any]]) -> None:
        known, self._members = self._members, {node["NodeID"]: node for node in alive}
        now = time.monotonic()
        for key in self._members:
            if key not in known or self._retry_at.get(key, now + 1) <= now:
                self._start_agent(key)

    def _take_order(self, order: Document) -> None:
        match order["order"]:
            case "call":
                self._call(order["id"], order["node"], order["method"], order["arguments"])
            case "replace":
                self._forget(order["node"])
                if order["node"] in self._members:
                    self._start_agent(order["node"])

    def _start_agent(self, key: str) -> None:
        self._retry_at.pop(key, None)
        options: Any = ray.remote(NodeAgent).options(
            num_cpus=0,
            max_restarts=0,
            max_concurrency=_AGENT_THREADS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(key, soft=False),
        )
        agent: Any = options.remote(self._rank_entry)
        self._agents[key] = agent
        self._start_due[key] = time.monotonic() + START_WITHIN_S
        self._when_answered(agent.describe.remote(), partial(self._take_ready, key, agent))

    def _take_ready(self, key: str, agent: Any, answer: Future[Any]) -> None:
        if not self._is_well(key, agent, answer):
            return
        member = self._members.get(key)
        if member is None:
            self._lose(key, "Ray has given the node up")
            return
        self._ready.add(key)
        self._start_due.pop(key, None)
        self._send(
            {
                "event": "joined",
                "node": key,
                "name": member.get("NodeName", ""),
                "address": member["NodeManagerAddress"],
                "description": answer.result(),
            }
        )
        self._poll(key, agent)

    def _is_well(self, key: str, agent: Any, answer: Future[Any]) -> bool:
        """Whether this is still the node's agent, and it has answered without an error."""
        if self._agents.get(key) is not agent:
            return False
        if (error := answer.exception()) is not None:
            self._lose(key, first_line(error))
            return False
        return True

    def _poll(self, key: str, agent: Any) -> None:
        self._answer_due.pop(key, None)  # moves it to the end of the order
        self._answer_due[key] = time.monotonic() + _POLL_S + _SILENT_AFTER_S
        self._when_answered(agent.poll.remote(_POLL_S), partial(self._take_news, key, agent))

    def _take_news(self, key: str, agent: Any, answer: Future[Any]) -> None:
        if not self._is_well(key, agent, answer):
            return
        documents = [document for document in answer.result() if document["event"] != "lost"]
        if documents:
            self._send({"event": "news", "node": key, "documents": documents})
        losses = [document for document in answer.result() if document["event"] == "lost"]
        if losses:
            self._lose(key, losses[0]["message"])
        else:
            self._poll(key, agent)

    def _call(self, call: int, key: str, method: str, arguments: list[Any]) -> None:
        if key not in self._ready:
            message = "the node is lost"
            self._send({"event": "failed", "id": call, "left": False, "message": message})
            return
        agent = self._agents[key]
        answer = getattr(agent, method).remote(*arguments)
        self._when_answered(answer, partial(self._take_answer, call, key, agent))

    def _take_answer(self, call: int, key: str, agent: Any, answer: Future[Any]) -> None:
        error = answer.exception()
        if error is None:
            self._send({"event": "answer", "id": call, "value": answer.result()})
            return
        left = isinstance(getattr(error, "cause", error), RanksLeftError)
        if not left and self._agents.get(key) is agent:
            self._lose(key, first_line(error))
        self._send({"event": "failed", "id": call, "left": left, "message": first_line(error)})

    def _lose_the_silent(self) -> None:
        """Loses the agents whose answers are overdue; the oldest calls come first."""
        now = time.monotonic()
        for due, what in ((self._start_due, "got ready"), (self._answer_due, "answered")):
            # Many nodes may be overdue at once.
            while (key := next(iter(due), None)) is not None and due[key] <= now:
                self._lose(
                    key, f"its agent has not {what} in time: it hangs, or its network is cut"
                )

    def _lose(self, key: str, message: str) -> None:
        self._send({"event": "lost", "node": key, "message": message})
        if key not in self._ready:
            self._retry_at[key] = time.monotonic() + _RETRY_S
        self._forget(key)

    def _forget(self, key: str) -> None:
        """Ends an agent where it can be reached; that ends every rank of its node."""
        self._ready.discard(key)
        self._start_due.pop(key, None)
        self._answer_due.pop(key, None)
        agent = self._agents.pop(key, None)
        if agent is not None:
            with contextlib.suppress(Exception):  # it has often ended already
                ray.kill(agent)

    def _when_answered(self, call: Any, take: Callable[[Future[Any]], None]) -> None:
        call.future().add_done_callback(lambda answer: self._todo.put(partial(take, answer)))

    def _send(self, event: Document) -> None:
        try:
            self._worker.send(event)
        except OSError:
            self._stop()


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without Ray's own coloured heading."""
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def main() -> None:
    parser = argparse.ArgumentParser(prog="workers.launchers.ray.bridge", description=__doc__)
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--address")
    parser.add_argument("--entry", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    arguments = parser.parse_args()
    worker = JsonLines(socket.socket(fileno=arguments.socket))
    worker.socket.set_inheritable(False)
    # Ray's workers search modules first in this process's current directory.
    empty = arguments.directory / "empty"
    empty.mkdir()
    os.chdir(empty)
    try:
        cluster: RayCluster = (
            LocalRay(directory=arguments.directory)
            if arguments.address is None
            else JoinedRay(arguments.address)
        )
    except RayClusterFailedError as error:
        worker.send({"event": "unusable", "message": str(error)})
        sys.exit(1)
    if Bridge(worker, cluster, arguments.entry).run():
        cluster.close()
    os._exit(0)  # Ray's exit handlers need the cluster


if __name__ == "__main__":
    main()

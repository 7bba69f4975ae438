"""The bridge to Ray: a process that joins the cluster for a worker and keeps an agent on each node.

The worker starts it below a warden, which ends it with the worker; the worker starts it again when
it ends. It is a process of its own since Ray ends a process that uses it: when the head does not
answer for long, when a raylet dies at certain moments, and when the process joins a second time.

It carries no messages of agents: each connects to the worker (`workers.launchers.agent`). On its
socket it receives {"order": "replace", "node": ...}, which ends the node's agent and starts another
one. A node's key is Ray's own id, which changes when Ray is started again on the node.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from layout_tuner.timing_mark import LONGEST_WAIT_S, is_timing
from layout_tuner.workers.errors import RayClusterFailedError
from layout_tuner.workers.launchers.agent import ADDRESS_VARIABLE, TOKEN_VARIABLE, NodeAgent, greet
from layout_tuner.workers.launchers.ray.cluster import (
    JoinedRay,
    LocalRay,
    RayCluster,
    prepare_environment,
)
from layout_tuner.workers.ranks.json_lines import Document, JsonLines
from layout_tuner.workers.ranks.processes import die_with_parent

prepare_environment()

import ray  # noqa: E402 (it reads the environment while it is imported)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

_LOG = logging.getLogger(__name__)  # its warnings go to the bridge's log

_LOOK_S: Final = 1.0
_CLUSTER_LOOK_S: Final = 0.25
_MOST_OF_THE_TIME: Final = 0.05
"""Most time of a core that listing the members of a large cluster may take."""

_RETRY_S: Final = 10.0
_CLOSE_WITHIN_S: Final = 10.0


class RayAgent:
    """The Ray actor of one node, around its agent."""

    def serve(self, address: str, token: str, rank_entry: str, fields: Document) -> None:
        """Serves the worker until the connection to it closes."""
        # Without this, an actor outlives a killed raylet by half a minute and more.
        die_with_parent(os.getppid())
        NodeAgent(greet(address, token, fields), rank_entry).run()


@dataclass(repr=False)
class Bridge:
    """Starts an agent on each node of the cluster, and another one where one has ended."""

    worker: JsonLines
    cluster: RayCluster
    address: str
    """Where the worker listens for agents."""
    token: str
    """What they greet it with."""
    rank_entry: str
    """"module:function" that a rank runs."""

    def __post_init__(self) -> None:
        self._agents: dict[str, tuple[Any, Any]] = {}
        """The agent of each node, and the call that it serves."""
        self._start_at: dict[str, float] = {}
        """When to start another agent on a node."""

    def run(self) -> None:
        """Serves until the worker has closed its end; then no agent is left."""
        threading.Thread(target=self._watch_cluster, daemon=True).start()
        pause_s = tended_at = 0.0
        while self._take_orders(pause_s):
            started = time.monotonic()
            # A look takes cores of ranks that time iterations here; other nodes may need one.
            if started - tended_at > LONGEST_WAIT_S or not is_timing():
                self._tend_agents()
                tended_at = started
            pause_s = max(_LOOK_S, (time.monotonic() - started) / _MOST_OF_THE_TIME)
        # The worker has closed the agents' lines too, so each ends the processes below it.
        if calls := [call for _, call in self._agents.values()]:
            ray.wait(calls, num_returns=len(calls), timeout=_CLOSE_WITHIN_S)

    def _watch_cluster(self) -> None:
        """Watches for the end of the cluster, without calls to Ray: those would wait for it."""
        while not self.cluster.has_ended():
            time.sleep(_CLUSTER_LOOK_S)
        _LOG.error("the Ray cluster ended by itself")
        os._exit(1)

    def _take_orders(self, within_s: float) -> bool:
        """Waits for orders and carries them out; returns whether the worker is there."""
        if not select.select([self.worker.socket], [], [], within_s)[0]:
            return True
        orders = self.worker.read(block=False)
        for order in orders or ():
            self._end_agent(order["node"])
            self._start_at[order["node"]] = 0.0
        return orders is not None

    def _tend_agents(self) -> None:
        """Starts agents on new nodes, and on nodes where one has ended some time ago."""
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
        now = time.monotonic()
        for key in self._ended_agents():
            self._end_agent(key)
            self._start_at[key] = now + _RETRY_S
        self._start_at = {key: due for key, due in self._start_at.items() if key in alive}
        for key, node in alive.items():
            if key not in self._agents and self._start_at.get(key, 0.0) <= now:
                self._start_agent(
                    key, node["NodeName"], node["NodeManagerAddress"], node.get("Labels") or {}
                )

    def _ended_agents(self) -> list[str]:
        """Nodes whose agents have ended; says why."""
        keys = {call: key for key, (_, call) in self._agents.items()}
        ended, _ = ray.wait([*keys], num_returns=len(keys), timeout=0) if keys else ([], [])
        for call in ended:
            with contextlib.suppress(Exception):
                _LOG.warning("an agent ended: %s", call.future().exception())
        return [keys[call] for call in ended]

    def _start_agent(self, key: str, name: str, address: str, labels: Mapping[str, str]) -> None:
        options: Any = ray.remote(RayAgent).options(
            num_cpus=0,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(key, soft=False),
        )
        agent = options.remote()
        fields = {
            "node": key,
            "address": address,
            "labels": dict(labels),
            **({} if name in ("", address) else {"name": name}),
        }
        self._agents[key] = (
            agent,
            agent.serve.remote(self.address, self.token, self.rank_entry, fields),
        )

    def _end_agent(self, key: str) -> None:
        """Ends an agent where it can be reached; that ends every rank of its node."""
        agent, _ = self._agents.pop(key, (None, None))
        if agent is not None:
            with contextlib.suppress(Exception):  # it has often ended already
                ray.kill(agent)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="layout_tuner.workers.launchers.ray.bridge", description=__doc__
    )
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--address")
    parser.add_argument("--entry", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    arguments = parser.parse_args()
    worker = JsonLines(socket.socket(fileno=arguments.socket))
    worker.socket.set_inheritable(False)
    address, token = (os.environ.pop(name) for name in (ADDRESS_VARIABLE, TOKEN_VARIABLE))
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
        sys.exit(str(error))
    code = 1
    try:
        Bridge(worker, cluster, address=address, token=token, rank_entry=arguments.entry).run()
        cluster.close()
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)  # Ray's exit handlers need the cluster


if __name__ == "__main__":
    main()

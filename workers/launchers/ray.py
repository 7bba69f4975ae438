"""The Ray launcher: one node agent on every node of the worker's Ray cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from search_spaces.cluster import Cluster
from workers.errors import NodeLostError, RanksLeftError
from workers.json_lines import Document
from workers.launchers.base import Node, NodeEvent
from workers.launchers.group_launcher import GroupLauncher
from workers.node_agent import NodeAgent
from workers.node_ranks import START_WITHIN_S
from workers.rank_task import RANK_ENTRY, RankTask
from workers.ray_cluster import LocalRay, prepare_environment

prepare_environment()

import ray  # noqa: E402 (it reads the environment while it is imported)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

_CALL_WITHIN_S: Final = 30.0
_POLL_S: Final = 5.0
_THREADS: Final = 4


class RayNodes:
    """The nodes of a Ray cluster, with an agent each.

    Ray is for membership and calls alone: which rank goes where is decided here, since its
    placement groups spread ranks over nodes and wait without a word for what can't be had.

    Args:
        num_devices: devices of a node.
        rank_entry: "module:function" that a rank runs.
    """

    def __init__(self, *, num_devices: int, rank_entry: str = RANK_ENTRY) -> None:
        self._num_devices = num_devices
        self._rank_entry = rank_entry
        self._nodes: list[Node] = []
        self._lost: dict[int, str] = {}
        self._ray = LocalRay()
        try:
            self._start_agents()
        except BaseException:
            self.close()
            raise

    @property
    def nodes(self) -> Sequence[Node]:
        """The nodes that were alive at the start."""
        return self._nodes

    @property
    def pids(self) -> Sequence[Mapping[str, int]]:
        """Pids of agent, warden and zygote, by node."""
        return self._pids

    def wait_until_ready(self) -> None:
        """They are: each agent has waited for its zygote before it described its node."""

    def start(self, tasks: Mapping[int, Sequence[RankTask]]) -> None:
        """Forks ranks on some nodes, on all at once."""
        calls = {
            node: self._agents[node].start.remote([task.to_mapping() for task in on_node])
            for node, on_node in tasks.items()
        }
        self._await(calls)

    def tell(self, nodes: Sequence[int], group: str, document: Document) -> None:
        """Sends a document to every rank of a group."""
        self._await({node: self._agents[node].tell.remote(group, document) for node in nodes})

    def poll(self, nodes: Sequence[int], group: str, timeout_s: float) -> list[NodeEvent]:
        """What happened; every node has one call outstanding, which returns with its next events."""
        if self._ray.has_ended():
            why = "the Ray cluster ended by itself"
            self._lost = dict.fromkeys(range(len(self._nodes)), why)
            lost = {"event": "lost", "message": why}
            return [NodeEvent(node=node, document=lost) for node in nodes]
        for node in nodes:
            if node not in self._polls:
                self._polls[node] = self._agents[node].poll.remote(_POLL_S)
        waiting = {self._polls[node]: node for node in nodes}
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
        events: list[NodeEvent] = []
        for call in ready:
            node = waiting[call]
            del self._polls[node]
            try:
                documents = ray.get(call)
            except ray.exceptions.RayError as error:
                documents = [{"event": "lost", "message": self._loss(node, error)}]
            for document in documents:
                if document["event"] == "lost":
                    self._lost[node] = document["message"]
                if document["event"] == "lost" or document["group"] == group:
                    events.append(NodeEvent(node=node, document=document))
        return events

    def end(self, nodes: Sequence[int], group: str) -> dict[int, str]:
        """Ends what is left of a group, on all nodes at once."""
        if self._ray.has_ended():
            return {}
        calls = {node: self._agents[node].end.remote(group) for node in nodes}
        tails: dict[int, str] = {}
        for call in calls.values():
            try:
                tails.update(ray.get(call, timeout=_CALL_WITHIN_S))
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, RanksLeftError):
                    raise RanksLeftError(str(error.cause)) from error
            except ray.exceptions.RayError:  # the agent is gone: its warden ends the ranks
                continue
        return tails

    def lost(self) -> Mapping[int, str]:
        """Nodes that are lost now, and why."""
        return self._lost

    def recover(self, node: int) -> None:
        """Starts the cluster and its agents anew: the simplest state that is known to be clean."""
        if node not in self._lost:
            return
        self.close()
        self._ray = LocalRay()
        self._start_agents()

    def close(self) -> None:
        """Ends the agents, what is below them, and the cluster."""
        if not self._ray.has_ended():
            with contextlib.suppress(ray.exceptions.RayError):  # the cluster's end is theirs too
                ray.get([agent.close.remote() for agent in self._agents], timeout=_CALL_WITHIN_S)
        self._ray.close()

    def _start_agents(self) -> None:
        self._polls: dict[int, Any] = {}
        self._lost = {}
        self._agents: list[Any] = []
        known = ray.nodes()  # type: ignore[no-untyped-call]
        alive = [node for node in known if node["Alive"]]
        agent_class = ray.remote(NodeAgent)
        for node in alive:
            options = agent_class.options(
                num_cpus=0,
                max_restarts=0,
                max_concurrency=_THREADS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            )
            self._agents.append(options.remote(self._rank_entry))
        calls = [agent.describe.remote() for agent in self._agents]
        try:
            described = ray.get(calls, timeout=START_WITHIN_S)
        except ray.exceptions.RayError as error:
            raise NodeLostError(f"a node agent did not get ready: {_first_line(error)}") from error
        self._pids = [description["pids"] for description in described]
        self._nodes = [
            Node(
                name=description["name"],
                address=node["NodeManagerAddress"],
                num_devices=self._num_devices,
                num_cores=description["num_cores"],
                core_ids=tuple(description["core_ids"]),
            )
            for node, description in zip(alive, described, strict=True)
        ]

    def _await(self, calls: Mapping[int, Any]) -> None:
        for node, call in calls.items():
            try:
                ray.get(call, timeout=_CALL_WITHIN_S)
            except ray.exceptions.RayError as error:
                self._lost[node] = self._loss(node, error)
                raise NodeLostError(self._lost[node], node=node) from error

    def _loss(self, node: int, error: Exception) -> str:
        return f"node {self._nodes[node].name} was lost: {_first_line(error)}"


def ray_launcher(cluster: Cluster, *, rank_entry: str = RANK_ENTRY) -> GroupLauncher:
    """Starts a local Ray cluster with a node agent on each node.

    Args:
        cluster: what this machine is a node of.
        rank_entry: "module:function" that a rank runs.
    """
    nodes = RayNodes(num_devices=cluster.devices_per_node, rank_entry=rank_entry)
    return GroupLauncher(nodes, cluster, allow_sharing=False)


def _first_line(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error  # not Ray's own coloured heading
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(error).__name__

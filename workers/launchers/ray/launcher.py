"""The Ray launcher: one node agent on every node of the worker's Ray cluster."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Final

from search_spaces.spec.cluster import Cluster
from search_spaces.trainers.program import ProgramTrainer
from workers.backoff import Backoff
from workers.errors import NodeLostError, RanksLeftError, RayClusterFailedError
from workers.launchers.base import Node, NodeEvent
from workers.launchers.event_router import EventRouter
from workers.launchers.group_launcher import GroupLauncher
from workers.launchers.ray.bridge_process import BridgeProcess
from workers.launchers.ray.cluster import ALONE
from workers.ranks.json_lines import Document
from workers.ranks.node_ranks import START_WITHIN_S
from workers.ranks.rank_task import RANK_ENTRY, RankTask

_LOG = logging.getLogger(__name__)

_FIRST_NODE_WITHIN_S: Final = 2 * START_WITHIN_S
_OTHERS_WITHIN_S: Final = 60.0
"""How long to wait for the other nodes of the allocation once one is there; they may join later."""

_CALL_WITHIN_S: Final = 60.0
"""The bridge answers every call, or reports the loss of the node, long before."""

_SHORTEST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 30.0
_HEALTHY_AFTER_S: Final = 60.0


class RayNodes:
    """The nodes of a Ray cluster, with an agent each, as the bridge to Ray reports them.

    Ray starts the agents and carries calls. It does not place ranks: its placement groups spread
    ranks over nodes, and wait without an error for resources that do not exist.

    Args:
        num_devices: devices of a node.
        address: "address:port" of the head of a cluster to join, whose token is in RAY_AUTH_TOKEN;
            None: a cluster of this machine alone is started.
        num_nodes: nodes to wait for, up to a limit; further nodes are used too.
        device_cores: CPU numbers by device; empty: equal contiguous shares.
        rank_entry: "module:function" that a rank runs.

    Raises:
        RayClusterFailedError: the cluster could not be started or joined, or no node got ready.
    """

    def __init__(
        self,
        *,
        num_devices: int,
        address: str | None = None,
        num_nodes: int = 1,
        device_cores: tuple[tuple[int, ...], ...] = (),
        rank_entry: str = RANK_ENTRY,
    ) -> None:
        self._num_devices = num_devices
        self._device_cores = device_cores
        self._flags = [f"--entry={rank_entry}", *([f"--address={address}"] if address else [])]
        self._router = EventRouter()
        self._changed = threading.Condition()
        self.nodes: list[Node] = []
        """The nodes that have joined, in this order; lost ones included."""
        self._keys: list[str] = []
        self.pids: list[Mapping[str, int]] = []
        """Pids of agent, warden and zygote, by node."""
        self._positions: dict[str, int] = {}  # by name and by key
        self._calls: dict[int, tuple[int, Future[Any]]] = {}
        self._numbers = itertools.count()
        self._closing = False
        self._unusable = ""
        self._bridge = BridgeProcess(self._flags, {} if address else ALONE)
        self._reader = threading.Thread(target=self._serve, name="ray-nodes", daemon=True)
        self._reader.start()
        try:
            self._wait_for_nodes(num_nodes)
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self) -> None:
        """Returns at once: each agent waits for its zygote before its node joins."""

    def start(self, tasks: Mapping[int, Sequence[RankTask]]) -> None:
        """Forks ranks on some nodes, on all of them at the same time."""
        self._router.open(next(iter(tasks.values()))[0].group, list(tasks))
        calls = [
            (node, self._call(node, "start", [asdict(task) for task in on_node]))
            for node, on_node in tasks.items()
        ]
        for node, call in calls:
            self._result(node, call)

    def tell(self, nodes: Sequence[int], group: str, document: Document) -> None:
        """Sends a document to every rank of a group."""
        for node, call in [(n, self._call(n, "tell", group, document)) for n in nodes]:
            self._result(node, call)

    def poll(self, _nodes: Sequence[int], group: str, timeout_s: float) -> list[NodeEvent]:
        """The events of a group and of its nodes since the last call."""
        return self._router.poll(group, timeout_s)

    def end(self, nodes: Sequence[int], group: str) -> dict[int, str]:
        """Ends the remaining processes of a group, on all nodes at the same time."""
        calls = [(node, self._call(node, "end", group)) for node in nodes]
        tails: dict[int, str] = {}
        left: RanksLeftError | None = None
        for node, call in calls:
            try:
                ended = self._result(node, call).items()
                tails.update({int(rank): tail for rank, tail in ended})
            except NodeLostError:  # its agent has ended: the warden ends the ranks
                continue
            except RanksLeftError as error:
                left = error
        self._router.close(group)
        if left is not None:
            raise left
        return tails

    def lost(self) -> Mapping[int, str]:
        """Nodes that are lost now, and why."""
        return self._router.lost()

    def recover(self, node: int) -> None:
        """Starts another agent on a lost node, as soon as Ray runs there."""
        if not self._router.is_lost(node):
            return
        why = self._router.lost().get(node, "")
        self._bridge.send({"order": "replace", "node": self._keys[node]})
        with self._changed:
            back = self._changed.wait_for(lambda: not self._router.is_lost(node), START_WITHIN_S)
        if not back:
            raise NodeLostError(f"{why}; it has not recovered in {START_WITHIN_S:g} s", node)

    def close(self) -> None:
        """Ends the agents, the processes below them, and a cluster that was started here."""
        self._closing = True
        self._bridge.close()
        self._reader.join()

    def _wait_for_nodes(self, num_nodes: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.nodes or self._unusable, _FIRST_NODE_WITHIN_S)
            if self.nodes:
                enough = self._changed.wait_for(
                    lambda: len(self.nodes) >= num_nodes, _OTHERS_WITHIN_S
                )
                if not enough:
                    _LOG.warning(
                        "%d of %d nodes have joined; others may join later",
                        len(self.nodes),
                        num_nodes,
                    )
                return
        within = f"no node got ready within {_FIRST_NODE_WITHIN_S:g} s"
        raise RayClusterFailedError(self._unusable or within)

    def _serve(self) -> None:
        """Handles events of the bridge; starts another one when it ends."""
        backoff = Backoff(_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            started = time.monotonic()
            try:
                for event in self._bridge.events():
                    self._take(event)
            except Exception:
                _LOG.exception(
                    "an event of the bridge to Ray can't be read, so the bridge is ended"
                )
                self._bridge.terminate()
            why = self._unusable or "the bridge to Ray ended"
            self._lose(range(len(self.nodes)), why)
            if self._closing:
                return
            why = f"{why}: {self._bridge.wait()}"
            with self._changed:
                self._unusable = why
                self._changed.notify_all()
            if time.monotonic() - started > _HEALTHY_AFTER_S:
                backoff.reset()
            pause_s = backoff.take()
            _LOG.warning("%s; another one starts in %g s", why, pause_s)
            time.sleep(pause_s)
            self._unusable = ""
            try:
                self._bridge.restart()
            except (OSError, RayClusterFailedError) as error:
                # It may work later, for example after a full disk.
                _LOG.error("the bridge to Ray can't be started: %s", error)

    def _take(self, event: Document) -> None:
        match event["event"]:
            case "news":
                self._router.deliver(self._positions[event["node"]], event["documents"])
            case "answer":
                self._answer(event["id"], lambda _, call: call.set_result(event["value"]))
            case "failed":
                kind = RanksLeftError if event["left"] else NodeLostError
                message = event["message"]
                self._answer(
                    event["id"],
                    lambda node, call: call.set_exception(self._error(kind, message, node)),
                )
            case "joined":
                self._take_joined(event)
            case "lost":
                self._take_lost(event["node"], event["message"])
            case "unusable":
                self._unusable = event["message"]

    def _take_joined(self, event: Document) -> None:
        """Adds a node at a new position, or at its former one where it has joined before."""
        described, address = event["description"], event["address"]
        name = event["name"] if event["name"] not in ("", address) else described["name"]
        position = self._positions.get(name)
        if (
            position is not None
            and not self._router.is_lost(position)
            and self.nodes[position].address != address
        ):
            name = f"{name} at {address}"  # two nodes of one machine
            position = self._positions.get(name)
        node = Node(
            name=name,
            address=address,
            num_devices=self._num_devices,
            num_cores=described["num_cores"],
            core_ids=tuple(described["core_ids"]),
            device_cores=self._device_cores,
        )
        if position is None:
            position = len(self.nodes)
            self.pids.append(described["pids"])
            self._keys.append(event["node"])
            self._positions[name] = position
            with self._changed:
                self.nodes.append(node)
        else:
            self._lose([position], "it was started again")
            self.pids[position], self._keys[position] = described["pids"], event["node"]
            self.nodes[position] = node
        self._positions[event["node"]] = position
        self._router.find(position)
        _LOG.info("node %s has joined", name)
        with self._changed:
            self._changed.notify_all()

    def _take_lost(self, key: str, message: str) -> None:
        position = self._positions.get(key)
        if position is None:
            _LOG.warning("a node does not get ready: %s", message)
        elif self._keys[position] == key:
            self._lose([position], message)

    def _lose(self, positions: Iterable[int], why: str) -> None:
        """Reports the loss of nodes to their groups, and fails the calls to them."""
        lost = set(positions)
        for position in lost:
            self._router.lose(position, self._loss(why, position))
        with self._changed:
            waiting = [number for number, (node, _) in self._calls.items() if node in lost]
        for number in waiting:
            self._answer(
                number, lambda node, call: call.set_exception(self._error(NodeLostError, why, node))
            )

    def _call(self, node: int, method: str, *arguments: Any) -> Future[Any]:
        call: Future[Any] = Future()
        with self._changed:
            number = next(self._numbers)
            self._calls[number] = node, call
        if self._router.is_lost(node):
            why = self._router.lost().get(node, "it was lost")
            self._answer(number, lambda *_: call.set_exception(NodeLostError(why, node)))
            return call
        order = {"order": "call", "id": number, "node": self._keys[node]}
        self._bridge.send({**order, "method": method, "arguments": arguments})
        return call

    def _result(self, node: int, call: Future[Any]) -> Any:
        """Waits for the answer of a node; ends a bridge that does not answer in time."""
        try:
            return call.result(_CALL_WITHIN_S)
        except TimeoutError as error:
            self._bridge.terminate()
            why = f"the bridge to Ray has not answered in {_CALL_WITHIN_S:g} s"
            raise NodeLostError(self._loss(why, node), node) from error

    def _answer(self, number: int, give: Callable[[int, Future[Any]], None]) -> None:
        """Completes a call once: its node may be lost while the answer is under way."""
        with self._changed:
            waiting = self._calls.pop(number, None)
        if waiting is not None:
            give(*waiting)

    def _error(
        self, kind: type[NodeLostError] | type[RanksLeftError], why: str, node: int
    ) -> Exception:
        return kind(self._loss(why, node) if kind is NodeLostError else why, node)

    def _loss(self, why: str, node: int) -> str:
        return f"node {self.nodes[node].name} was lost: {why}"


def ray_launcher(
    cluster: Cluster,
    *,
    address: str | None = None,
    num_nodes: int = 1,
    device_cores: tuple[tuple[int, ...], ...] = (),
    rank_entry: str = RANK_ENTRY,
    trainers: Mapping[str, ProgramTrainer] = MappingProxyType({}),
) -> GroupLauncher:
    """Joins an allocation's Ray cluster, or starts one of this machine alone.

    Args:
        cluster: the cluster of the nodes.
        address: "address:port" of the cluster's head, whose token is in RAY_AUTH_TOKEN; None: one
            is started.
        num_nodes: nodes to wait for, up to a limit; further nodes are used too.
        device_cores: CPU numbers by device; empty: equal contiguous shares.
        rank_entry: "module:function" that a rank runs.
        trainers: programs that probes may run, by name.

    Raises:
        RayClusterFailedError: the cluster could not be started or joined.
    """
    if address is not None and "RAY_AUTH_TOKEN" not in os.environ:
        raise RayClusterFailedError(
            f"RAY_AUTH_TOKEN is not set: set it to the token with which the nodes of {address} were started"
        )
    nodes = RayNodes(
        num_devices=cluster.devices_per_node,
        address=address,
        num_nodes=num_nodes,
        device_cores=device_cores,
        rank_entry=rank_entry,
    )
    return GroupLauncher(nodes, cluster, allow_sharing=False, trainers=trainers)

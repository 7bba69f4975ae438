"""The Ray launcher: one node agent on every node of the worker's Ray cluster."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from layout_tuner.protocol.connection.backoff import Backoff
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.trainers.program import ProgramTrainer
from layout_tuner.workers.errors import NodeLostError, RayClusterFailedError
from layout_tuner.workers.launchers.agent import ADDRESS_VARIABLE, TOKEN_VARIABLE, log_tails
from layout_tuner.workers.launchers.agent_listener import AgentListener, Receiver
from layout_tuner.workers.launchers.event_router import EventRouter
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.launchers.launcher_nodes import Node, NodeEvent
from layout_tuner.workers.launchers.ray.bridge_process import BridgeProcess
from layout_tuner.workers.launchers.ray.cluster import ALONE, NODE_ADDRESS, resolved
from layout_tuner.workers.ranks.json_lines import Document, JsonLines
from layout_tuner.workers.ranks.rank_task import RANK_ENTRY, RankTask
from layout_tuner.workers.ranks.zygote_client import START_WITHIN_S

_LOG = logging.getLogger(__name__)

_FIRST_NODE_WITHIN_S: Final = 2 * START_WITHIN_S
_OTHERS_WITHIN_S: Final = 60.0
"""How long to wait for the other nodes of the allocation once one is there; they may join later."""

_ENDED_WITHIN_S: Final = 60.0
"""A node answers the order "end", or is lost, long before."""


@dataclass(kw_only=True)
class _Agent:
    """The agent of a node, while it is connected."""

    key: str
    """Ray's id of the node."""
    hello: Document
    line: JsonLines
    position: int | None = None
    """Position of its node; None: its zygote is not ready yet."""


class RayNodes:
    """The nodes of a Ray cluster, with an agent each, which Ray starts and which connects here.

    Ray does not place ranks: its placement groups spread ranks over nodes, and wait without an
    error for resources that do not exist.

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
        self._address = address
        self._device_cores = device_cores
        self._router = EventRouter()
        self._changed = threading.Condition()
        self.nodes: list[Node] = []
        """The nodes that have joined, in this order; lost ones included."""
        self._agents: list[_Agent] = []
        """The agent of each node, also of lost ones."""
        self.pids: list[Mapping[str, int]] = []
        """Pids of agent, warden and zygote, by node."""
        self._agent_ends = Counter[int]()
        self._ends: dict[tuple[int, str], Future[Document]] = {}
        """Groups that nodes have been ordered to end."""
        self._closing = threading.Event()
        self._unusable = ""
        self._has_joined = False
        """Whether a node has joined through the present bridge."""
        self._listener = AgentListener(NODE_ADDRESS if address is None else _own_address(address))
        token = secrets.token_hex(16)
        self._listener.expect(token, self._connected)
        flags = [f"--entry={rank_entry}", *([f"--address={address}"] if address else [])]
        variables = {ADDRESS_VARIABLE: self._listener.address, TOKEN_VARIABLE: token}
        variables |= {} if address else ALONE
        self._bridge_arguments = flags, variables
        try:
            self._bridge = BridgeProcess(flags, variables)
        except BaseException:
            self._listener.close()
            raise
        self._reader = threading.Thread(target=self._keep_bridge, name="ray-bridge", daemon=True)
        self._reader.start()
        try:
            self._wait_for_nodes(num_nodes)
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self) -> None:
        """Returns at once: each agent waits for its zygote before its node joins."""

    def start(self, tasks: Mapping[int, Sequence[RankTask]]) -> None:
        self._router.open(next(iter(tasks.values()))[0].group, list(tasks))
        for node, on_node in tasks.items():
            self._order(node, {"order": "start", "tasks": [asdict(task) for task in on_node]})

    def tell(self, nodes: Sequence[int], group: str, document: Document) -> None:
        for node in nodes:
            self._order(node, {"order": "tell", "group": group, "document": document})

    def poll(self, _nodes: Sequence[int], group: str, timeout_s: float) -> list[NodeEvent]:
        return self._router.poll(group, timeout_s)

    def end(self, nodes: Sequence[int], group: str) -> dict[int, str]:
        """Ends the remaining processes of a group, on all nodes at the same time."""
        ends = {node: self._end_on(node, group) for node in nodes}
        ended: dict[int, Document] = {}
        give_up_at = time.monotonic() + _ENDED_WITHIN_S
        for node, end in ends.items():
            try:
                ended[node] = end.result(max(0.0, give_up_at - time.monotonic()))
            except NodeLostError:  # its agent has ended: the warden ends the ranks
                continue
            except TimeoutError:
                self._lose([node], f"its agent has not answered in {_ENDED_WITHIN_S:g} s")
        self._router.close(group)
        return log_tails(ended)

    def lost(self) -> Mapping[int, str]:
        return self._router.lost()

    def agent_ends(self, node: int) -> int:
        return self._agent_ends[node]

    def recover(self, node: int) -> None:
        """Starts another agent on a lost node, as soon as Ray runs there.

        Where that fails and no other node is left, the bridge is replaced, and with it a cluster
        that was started here.
        """
        if not self._router.is_lost(node):
            return
        why, bridge = self._router.lost().get(node, ""), self._bridge
        bridge.replace(self._agents[node].key)
        with self._changed:
            back = self._changed.wait_for(lambda: not self._router.is_lost(node), START_WITHIN_S)
        if not back:
            words = bridge.last_words()
            # One that has started meanwhile has not had its time yet.
            if bridge is self._bridge and len(self._router.lost()) == len(self.nodes):
                bridge.end()
            raise NodeLostError(
                f"{why}; it has not recovered in {START_WITHIN_S:g} s{self._way_out(node)}{words}",
                node,
            )

    def close(self) -> None:
        """Ends the agents, the processes below them, and a cluster that was started here."""
        with self._changed:
            self._closing.set()
        self._listener.close()
        self._bridge.close()
        self._reader.join()

    # The thread that reads the agents' connections calls the next three methods.

    def _connected(self, hello: Document, line: JsonLines) -> Receiver:
        agent = _Agent(key=hello["node"], hello=hello, line=line)
        return Receiver(
            take=partial(self._take, agent), disconnected=partial(self._disconnected, agent)
        )

    def _take(self, agent: _Agent, documents: Sequence[Document]) -> None:
        events, loss = [], None
        for document in documents:
            match document["event"]:
                case "alive":
                    continue
                case "ready":
                    self._take_ready(agent, document["pids"])
                case "ended" if agent.position is not None:
                    end = self._ends.pop((agent.position, document["group"]), None)
                    if end is not None:
                        end.set_result(document)
                case "lost":
                    loss = document["message"]
                case _:
                    events.append(document)
        if agent.position is not None and self._agents[agent.position] is agent:
            self._router.deliver(agent.position, events)
        if loss is not None:
            self._lose_agent(agent, loss, is_agents=False)

    def _disconnected(self, agent: _Agent, is_cut_off: bool) -> None:
        why = "its agent hangs, or its network is cut" if is_cut_off else "its agent has ended"
        self._lose_agent(agent, why)

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
        within = f"no node got ready within {_FIRST_NODE_WITHIN_S:g} s{self._bridge.last_words()}"
        raise RayClusterFailedError(self._unusable or within)

    def _way_out(self, node: int) -> str:
        """What a user can do about a node of a cluster that was not started here."""
        if self._address is None:
            return ""
        name = self.nodes[node].name
        return f"; start Ray on {name} again, which this worker can't: its head is {self._address}"

    def _keep_bridge(self) -> None:
        backoff = Backoff(0.1, 30.0)
        while True:
            started = time.monotonic()
            why = f"the bridge to Ray ended: {self._bridge.wait()}"
            self._bridge.close()
            self._lose(range(len(self.nodes)), why)
            with self._changed:
                if self._has_joined:
                    backoff.reset()  # the bridge can work, and somebody may have killed it
                self._has_joined, self._unusable = False, why
                self._changed.notify_all()
            pause_s = backoff.take_after(time.monotonic() - started)
            if not self._closing.is_set():
                _LOG.warning("%s; another one starts in %g s", why, pause_s)
            self._closing.wait(pause_s)
            try:
                with self._changed:
                    if self._closing.is_set():
                        return
                    self._unusable = ""
                    self._bridge = BridgeProcess(*self._bridge_arguments)
            except (OSError, RayClusterFailedError) as error:
                # It may work later, for example after a full disk.
                _LOG.error("the bridge to Ray can't be started: %s", error)

    def _take_ready(self, agent: _Agent, pids: Mapping[str, int]) -> None:
        """Adds a node at a new position, or at its former one where it has joined before."""
        name, address = agent.hello["name"], agent.hello["address"]
        position = self._position(name)
        if (
            position is not None
            and not self._router.is_lost(position)
            and self.nodes[position].address != address
        ):
            name = f"{name} at {address}"  # two nodes of one machine
            position = self._position(name)
        node = Node(
            name=name,
            address=address,
            num_devices=self._num_devices,
            num_cores=agent.hello["num_cores"],
            core_ids=tuple(agent.hello["core_ids"]),
            device_cores=self._device_cores,
            labels=agent.hello.get("labels", {}),
            switches=tuple(agent.hello["switches"]),
        )
        with self._changed:
            if position is None:
                position = len(self.nodes)
                self.pids.append(pids)
                self._agents.append(agent)
                self.nodes.append(node)
            else:
                self._lose([position], "it was started again")
                self.pids[position], self._agents[position] = pids, agent
                self.nodes[position] = node
            agent.position, self._has_joined = position, True
            self._router.find(position)
            self._changed.notify_all()
        _LOG.info("node %s has joined", name)

    def _position(self, name: str) -> int | None:
        return next((i for i, node in enumerate(self.nodes) if node.name == name), None)

    def _lose_agent(self, agent: _Agent, why: str, *, is_agents: bool = True) -> None:
        if agent.position is None:
            _LOG.warning("node %s does not get ready: %s", agent.hello["name"], why)
        elif self._agents[agent.position] is agent:
            self._lose([agent.position], why, is_agents=is_agents)

    def _lose(self, positions: Iterable[int], why: str, *, is_agents: bool = True) -> None:
        """Reports the loss of nodes to their groups; their agents end all processes there.

        `is_agents` is whether the agent or Ray has ended, and not the zygote below the agent.
        """
        lost = set(positions)
        for position in lost:
            if is_agents and not self._router.is_lost(position):
                self._agent_ends[position] += 1
            self._router.lose(position, self._loss(why, position))
            self._agents[position].line.end_writing()
        for node, group in [order for order in tuple(self._ends) if order[0] in lost]:
            if (end := self._ends.pop((node, group), None)) is not None:
                end.set_exception(NodeLostError(self._loss(why, node), node))

    def _end_on(self, node: int, group: str) -> Future[Document]:
        end = self._ends[node, group] = Future()
        try:
            self._order(node, {"order": "end", "group": group})
        except NodeLostError as error:
            if self._ends.pop((node, group), None) is not None:
                end.set_exception(error)
        return end

    def _order(self, node: int, order: Document) -> None:
        """Sends an order to the agent of a node. Raises NodeLostError if the node is lost."""
        if self._router.is_lost(node):
            raise NodeLostError(self._router.lost().get(node, "it was lost"), node)
        try:
            self._agents[node].line.send(order)
        except OSError as error:
            raise NodeLostError(self._loss(str(error), node), node) from error

    def _loss(self, why: str, node: int) -> str:
        return f"node {self.nodes[node].name} was lost: {why}"


def _own_address(head: str) -> str:
    """This machine's address on the way to the head of a cluster, which its nodes reach too."""
    host, _, port = resolved(head).rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, int(port)))  # sends nothing
        return str(way.getsockname()[0])


def ray_launcher(
    cluster: Cluster,
    *,
    address: str | None = None,
    trainers: Mapping[str, ProgramTrainer] = MappingProxyType({}),
    **settings: Any,
) -> GroupLauncher:
    """Joins an allocation's Ray cluster, or starts one of this machine alone.

    `settings` are those of `RayNodes`.
    """
    if address is not None and "RAY_AUTH_TOKEN" not in os.environ:
        raise RayClusterFailedError(
            f"RAY_AUTH_TOKEN is not set: set it to the token with which the nodes of {address} were started"
        )
    nodes = RayNodes(num_devices=cluster.devices_per_node, address=address, **settings)
    return GroupLauncher(nodes, cluster, allow_sharing=False, trainers=trainers)

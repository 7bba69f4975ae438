"""The srun launcher: one Slurm step for each group of ranks, on the nodes of the group.

On Slingshot, Slurm gives network credentials to each step, so ranks that are forked in a step of
their own have them for certain. Each group starts a step, which imports torch again: the Ray
launcher is faster.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.site import Site
from layout_tuner.trainers.program import ProgramTrainer
from layout_tuner.workers.errors import NodeLostError, RanksLeftError, WorkerError
from layout_tuner.workers.launchers.agent import ADDRESS_VARIABLE, TOKEN_VARIABLE
from layout_tuner.workers.launchers.agent_listener import AgentListener
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.launchers.launcher_nodes import Node, NodeEvent
from layout_tuner.workers.launchers.slurm_step.srun_process import SrunProcess
from layout_tuner.workers.launchers.slurm_step.step import Step
from layout_tuner.workers.launchers.slurm_step.step_node import STEP_VARIABLE
from layout_tuner.workers.ranks.json_lines import Document
from layout_tuner.workers.ranks.rank_task import RANK_ENTRY, RankTask
from layout_tuner.workers.ranks.warden import python_module, with_our_package
from layout_tuner.workers.slurm.jobs import SlurmAllocation

_LOG = logging.getLogger(__name__)

_MEETING: Final = "meeting-"
"""Prefix of the names of groups without ranks, which query the nodes."""
_CLOSE_WITHIN_S: Final = 60.0
MAX_STEPS: Final = 90
"""Steps at once: sites ask for fewer than a hundred `srun` a batch host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """How steps are started in an allocation."""

    job_id: str
    """Of the allocation."""
    node_names: tuple[str, ...]
    addresses: tuple[str, ...]
    listen_address: str
    """This host's address, to which the nodes connect."""
    num_devices: int
    """Devices of a node by its description."""
    environment: Mapping[str, str]
    """Of the ranks, and of Slurm's commands."""
    several_nodes_only: frozenset[str] = frozenset()
    """Variables that ranks of groups on one node must not have."""
    device_cores: tuple[tuple[int, ...], ...] = ()
    """Ids of the cores nearest to each device; empty: equal shares of the step's cores."""
    options: tuple[str, ...] = ()
    """Options of every `srun` here, which override those of the launcher."""
    max_steps: int = MAX_STEPS
    """Most steps at the same time; further ones wait."""
    connect_within_s: float = 120.0
    """How long a node may take from the start of its step until it connects."""
    meet_within_s: float = 180.0
    """How long nodes are queried in smaller parts where a step of all nodes fails, at the start."""
    rank_entry: str = RANK_ENTRY
    """"module:function" that a rank runs."""


class SrunNodes:
    """An allocation's nodes, with a step for each running group; NodeLostError if none answers."""

    def __init__(self, settings: StepSettings) -> None:
        self.settings = settings
        self.listener = AgentListener(settings.listen_address)
        self._lock = threading.Condition()
        """Held around the steps; notified when a group has ended."""
        self._steps: dict[str, Step] = {}
        """Steps by group, also those that wait until fewer run."""
        self._tokens: dict[str, str] = {}
        self._waiting: deque[str] = deque()
        self._launched: set[str] = set()
        self._lost: dict[int, str] = {}
        try:
            self.nodes = self._meet_all()
            """All nodes of the allocation, also lost ones."""
        except BaseException:
            self.listener.close()
            raise

    def step(self, group: str) -> Step:
        with self._lock:
            return self._steps[group]

    def lost(self) -> Mapping[int, str]:
        """Nodes that did not connect, or whose connection broke, and have not answered since."""
        with self._lock:
            return dict(self._lost)

    def agent_ends(self, _node: int) -> int:
        return 0  # each probe has agents of its own

    def wait_until_ready(self) -> None:
        """Returns at once: a step is started for each group."""

    def start(self, tasks: Mapping[int, Sequence[RankTask]]) -> None:
        """Starts a step, at once or when fewer run; "started" follows when the ranks run."""
        first = next(iter(tasks.values()))[0]
        for node, why in self.lost().items():
            if node in tasks:
                raise NodeLostError(why, node=node)
        self._new_step(first.group, tuple(tasks)).start(tasks)
        self._launch_what_may_run()

    def tell(self, _nodes: Sequence[int], group: str, document: Document) -> None:
        self.step(group).tell({"order": "tell", "group": group, "document": document})

    def poll(self, _nodes: Sequence[int], group: str, timeout_s: float) -> list[NodeEvent]:
        step = self.step(group)
        events = step.poll(timeout_s)
        self._note_losses(step)
        return events

    def end(self, _nodes: Sequence[int], group: str) -> dict[int, str]:
        """Ends the group, then its step; returns when no process of either is left."""
        with self._lock:
            step = self._steps.get(group)
            token = self._tokens.pop(group, None)
            if step is None or token is None:  # it was not started, or another thread ends it
                return {}
            if group in self._waiting:
                self._waiting.remove(group)
            self.listener.expect_no_more(token)
        try:
            return step.end()
        finally:
            self._note_losses(step)
            with self._lock:
                del self._steps[group]
                self._launched.discard(group)
                self._lock.notify_all()
            self._launch_what_may_run()

    def recover(self, node: int) -> None:
        """Checks whether a lost node answers again, and no process of an ended step is left on it.

        Raises:
            NodeLostError: it does not, or some are left.
        """
        hellos, losses = self._meet([node])
        name = self.nodes[node].name
        if node not in hellos:
            raise NodeLostError(losses.get(node, f"node {name} does not answer"), node=node)
        with self._lock:
            running = {_step_name(group) for group in self._steps}
        if left := sorted(set(hellos[node]["steps"]) - running):
            message = (
                f"processes of steps that have ended are left on node {name}: {', '.join(left)}"
            )
            raise NodeLostError(message, node=node)
        with self._lock:
            self._lost.pop(node, None)
            self.nodes[node] = self._describe(node, hellos[node])

    def close(self) -> None:
        with self._lock:
            groups = list(self._steps)
        for group in groups:
            try:
                self.end((), group)
            except WorkerError as error:
                _LOG.error("%s", error)
        with self._lock:  # other threads end theirs
            self._lock.wait_for(lambda: not self._steps, _CLOSE_WITHIN_S)
        self.listener.close()

    def _meet_all(self) -> list[Node]:
        """Queries all nodes by a first small step."""
        everyone = range(len(self.settings.node_names))
        give_up_at = time.monotonic() + self.settings.meet_within_s
        hellos, losses = self._meet_in_parts(everyone, give_up_at)
        if not hellos:
            why = "; ".join(dict.fromkeys(losses.values()))
            raise NodeLostError(f"no node of job {self.settings.job_id} answers: {why}")
        some = next(iter(hellos.values()))
        self._lost = {node: losses[node] for node in everyone if node not in hellos}
        for why in self._lost.values():
            _LOG.warning("%s", why)
        unknown = {**some, "switches": ()}
        return [self._describe(node, hellos.get(node, unknown)) for node in everyone]

    def _meet_in_parts(
        self, nodes: Sequence[int], give_up_at: float
    ) -> tuple[dict[int, Document], dict[int, str]]:
        """Queries nodes; in halves where that fails, since one node that is down fails a step."""
        hellos, losses = self._meet(nodes)
        if hellos or len(nodes) == 1 or time.monotonic() > give_up_at:
            return dict(hellos), dict(losses)
        found: dict[int, Document] = {}
        lost: dict[int, str] = {}
        half = len(nodes) // 2
        for part in (nodes[:half], nodes[half:]):
            of_part, lost_of_part = self._meet_in_parts(part, give_up_at)
            found.update(of_part)
            lost.update(lost_of_part)
        return found, lost

    def _meet(self, nodes: Sequence[int]) -> tuple[Mapping[int, Document], Mapping[int, str]]:
        """Queries nodes; returns the greetings of some, and why the others did not answer."""
        group = f"{_MEETING}{secrets.token_hex(6)}"
        step = self._new_step(group, nodes)
        try:
            self._launch_what_may_run()
            hellos = step.hellos()
        finally:
            try:
                self.end(nodes, group)
            except RanksLeftError as error:  # it had no rank
                _LOG.warning("%s", error)
        return hellos, step.reasons

    def _describe(self, node: int, hello: Document) -> Node:
        return Node(
            name=self.settings.node_names[node],
            address=self.settings.addresses[node],
            num_devices=self.settings.num_devices,
            num_cores=hello["num_cores"],
            core_ids=tuple(hello["core_ids"]),
            device_cores=self.settings.device_cores,
            switches=tuple(hello["switches"]),
        )

    def _new_step(self, group: str, nodes: Sequence[int]) -> Step:
        names = {node: self.settings.node_names[node] for node in nodes}
        step = Step(group=group, nodes=names, connect_within_s=self.settings.connect_within_s)
        with self._lock:
            token = secrets.token_hex(16)
            self._steps[group] = step
            self._tokens[group] = token
            self._waiting.append(group)
        self.listener.expect(token, step.connected)
        return step

    def _launch_what_may_run(self) -> None:
        """Launches waiting steps in their order, up to the limit."""
        with self._lock:
            while self._waiting and len(self._launched) < self.settings.max_steps:
                group = self._waiting.popleft()
                self._launched.add(group)
                step = self._steps[group]
                try:
                    step.launch(self._srun(group, step.nodes))
                except OSError as error:  # fails this group only, not the one that ended before
                    step.give_up(f"srun can't be started: {error}")
            if self._waiting:
                most, waiting = self.settings.max_steps, len(self._waiting)
                _LOG.info("%d groups wait until fewer than %d steps run", waiting, most)

    def _srun(self, group: str, nodes: Sequence[int]) -> SrunProcess:
        settings = self.settings
        names = [settings.node_names[node] for node in nodes]
        left_out = settings.several_nodes_only if len(names) == 1 else frozenset()
        inherited = {k: v for k, v in settings.environment.items() if k not in left_out}
        return SrunProcess(
            job_id=settings.job_id,
            name=_step_name(group),
            options=[
                "--overlap",
                f"--nodes={len(names)}",
                f"--ntasks={len(names)}",
                "--ntasks-per-node=1",
                f"--nodelist={','.join(names)}",
                "--cpu-bind=none",
                "--mem=0",
                "--no-kill",  # the other nodes must still report when one dies
                "--kill-on-bad-exit=0",
                "--wait=0",
                "--input=none",
                "--quit-on-interrupt",
                *settings.options,
                *python_module("layout_tuner.workers.launchers.slurm_step.step_node"),
                f"--entry={settings.rank_entry}",
                *(["--look"] if group.startswith(_MEETING) else []),
            ],
            environment={
                **with_our_package(inherited),
                STEP_VARIABLE: _step_name(group),
                ADDRESS_VARIABLE: self.listener.address,
                TOKEN_VARIABLE: self._tokens[group],
            },
        )

    def _note_losses(self, step: Step) -> None:
        with self._lock:
            for node, why in step.losses.items():
                self._lost.setdefault(node, why)


def _step_name(group: str) -> str:
    return f"layout-tuner-{group}"


def srun_launcher(
    cluster: Cluster,
    site: Site | None,
    allocation: SlurmAllocation,
    *,
    rank_entry: str = RANK_ENTRY,
    environment: Mapping[str, str] | None = None,
    trainers: Mapping[str, ProgramTrainer] = MappingProxyType({}),
) -> GroupLauncher:
    """Starts one Slurm step a group, in the allocation of this process; see `SrunNodes`."""
    site = site or Site()
    environment = dict(os.environ if environment is None else environment)
    names, cores = allocation.node_names, site.cores_per_node
    addresses = tuple(site.address(name, index) for index, name in enumerate(names))
    settings = StepSettings(
        job_id=allocation.job_id,
        node_names=names,
        addresses=addresses,
        listen_address=_own_address(dict(zip(names, addresses, strict=True)), environment),
        num_devices=cluster.devices_per_node,
        environment=environment,
        several_nodes_only=frozenset(site.environment_of_several_nodes),
        device_cores=site.device_cores,
        # Where a job holds whole nodes, Slurm gives a step only GPUs that the job or step requests.
        options=(
            *(() if cores is None else (f"--cpus-per-task={cores}",)),
            *site.devices_options(cluster),
            *site.srun,
        ),
        rank_entry=rank_entry,
    )
    return GroupLauncher(SrunNodes(settings), cluster, allow_sharing=False, trainers=trainers)


def _own_address(addresses: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """The address of this host for the nodes; the batch host is usually the job's first node."""
    host = socket.gethostname()
    for name in (environment.get("SLURMD_NODENAME", ""), host, host.split(".")[0]):
        if name in addresses:
            return addresses[name]
    return host

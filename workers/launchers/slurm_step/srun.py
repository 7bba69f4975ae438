"""The srun launcher: one Slurm step a group, on that group's nodes alone.

On Slingshot the credentials of the network are given to a step, so ranks that were forked in a step
of their own are sure to have them. A group costs the start of a step, which imports torch anew:
the Ray launcher is the fast one.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from workers.errors import NodeLostError, RanksLeftError, WorkerError
from workers.json_lines import Document
from workers.launchers.base import Node, NodeEvent
from workers.launchers.srun_process import SrunProcess
from workers.launchers.step import Step
from workers.launchers.step_lines import StepLines
from workers.rank_task import RANK_ENTRY, RankTask
from workers.step_node import ADDRESS_VARIABLE, STEP_VARIABLE, TOKEN_VARIABLE
from workers.warden import python_module, with_our_package

_LOG = logging.getLogger(__name__)

_MEETING: Final = "meeting-"
"""Begins the names of groups that are there to get to know nodes, and have no ranks."""
_CLOSE_WITHIN_S: Final = 60.0
MAX_STEPS: Final = 90
"""Steps at once: sites ask for fewer than a hundred `srun` a batch host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """How steps are started in an allocation."""

    job_id: str
    """The allocation's."""
    node_names: tuple[str, ...]
    """Names of its nodes, as Slurm calls them."""
    addresses: tuple[str, ...]
    """Where each node is reached by the others."""
    listen_address: str
    """This host's address, where the nodes call in."""
    num_devices: int
    """Devices that a node is described with."""
    environment: Mapping[str, str]
    """Of the ranks, and of Slurm's commands."""
    several_nodes_only: frozenset[str] = frozenset()
    """Variables that ranks of one node alone must not have."""
    device_cores: tuple[tuple[int, ...], ...] = ()
    """Ids of the cores nearest to each device; empty: equal shares of what the step has."""
    options: tuple[str, ...] = ()
    """Options of every `srun` here, which go over ours."""
    max_steps: int = MAX_STEPS
    """Steps at once; more wait for their turn."""
    connect_within_s: float = 120.0
    """How long a node may take from the start of its step to its call."""
    meet_within_s: float = 180.0
    """How long nodes that do not answer together are asked apart, at the start."""
    rank_entry: str = RANK_ENTRY
    """"module:function" that a rank runs."""


@dataclass(kw_only=True, slots=True)
class _Running:
    """Steps that run, and those that wait until fewer do."""

    by_group: dict[str, Step] = field(default_factory=dict)
    launched: set[str] = field(default_factory=set)
    waiting: deque[str] = field(default_factory=deque)
    tokens: dict[str, str] = field(default_factory=dict)


class SrunNodes:
    """The nodes of an allocation, which a step runs on as long as a group needs it.

    Raises:
        NodeLostError: no node answers at all.
    """

    def __init__(self, settings: StepSettings) -> None:
        self.settings = settings
        self.lines = StepLines(settings.listen_address)
        self._lock = threading.Condition()
        """Held for what runs; told when a group has ended."""
        self._running = _Running()
        self._lost: dict[int, str] = {}
        try:
            self._nodes = self._meet_all()
        except BaseException:
            self.lines.close()
            raise

    @property
    def nodes(self) -> Sequence[Node]:
        """All nodes of the allocation, the lost ones included."""
        return self._nodes

    def step(self, group: str) -> Step:
        """The step of a group that runs."""
        with self._lock:
            return self._running.by_group[group]

    def lost(self) -> Mapping[int, str]:
        """Nodes that did not call in, or whose line broke, and have not answered since."""
        with self._lock:
            return dict(self._lost)

    def wait_until_ready(self) -> None:
        """Nothing can be got ready before a group is known."""

    def start(self, tasks: Mapping[int, Sequence[RankTask]]) -> None:
        """Starts a step, now or when there are fewer; the event "started" tells when ranks run."""
        first = next(iter(tasks.values()))[0]
        for node, why in self.lost().items():
            if node in tasks:
                raise NodeLostError(why, node=node)
        step = self._new_step(first.group, tuple(tasks))
        step.start(tasks)
        self._launch_what_may_run()

    def tell(self, _nodes: Sequence[int], group: str, document: Document) -> None:
        """Sends a document to every rank of a group."""
        self.step(group).tell({"order": "tell", "group": group, "document": document})

    def poll(self, _nodes: Sequence[int], group: str, timeout_s: float) -> list[NodeEvent]:
        """What happened to the group since the last call."""
        step = self.step(group)
        events = step.poll(timeout_s)
        self._note_losses(step)
        return events

    def end(self, _nodes: Sequence[int], group: str) -> dict[int, str]:
        """Ends the group, then its step; returns when its `srun` has ended and nothing is left."""
        with self._lock:
            step = self._running.by_group.get(group)
            token = self._running.tokens.pop(group, None)
            if step is None or token is None:  # it was never started, or another thread ends it
                return {}
            if group in self._running.waiting:
                self._running.waiting.remove(group)
            self.lines.expect_no_more(token)
        try:
            return step.end()
        finally:
            self._note_losses(step)
            with self._lock:
                del self._running.by_group[group]
                self._running.launched.discard(group)
                self._lock.notify_all()
            self._launch_what_may_run()

    def recover(self, node: int) -> None:
        """Asks a lost node whether it is there again, and clean.

        Raises:
            NodeLostError: it is not.
        """
        hellos, losses = self._meet([node])
        name = self._nodes[node].name
        if node not in hellos:
            raise NodeLostError(losses.get(node, f"node {name} does not answer"), node=node)
        with self._lock:
            running = {_step_name(group) for group in self._running.by_group}
        if left := sorted(set(hellos[node]["steps"]) - running):
            message = (
                f"processes of steps that have ended are left on node {name}: {', '.join(left)}"
            )
            raise NodeLostError(message, node=node)
        with self._lock:
            self._lost.pop(node, None)
            self._nodes[node] = self._describe(node, hellos[node])

    def close(self) -> None:
        """Ends every step."""
        with self._lock:
            groups = list(self._running.by_group)
        for group in groups:
            try:
                self.end((), group)
            except WorkerError as error:
                _LOG.error("%s", error)
        with self._lock:  # those whose own threads end them
            self._lock.wait_for(lambda: not self._running.by_group, _CLOSE_WITHIN_S)
        self.lines.close()

    def _meet_all(self) -> list[Node]:
        """What the nodes are, as a first small step tells."""
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
        return [self._describe(node, hellos.get(node, some)) for node in everyone]

    def _meet_in_parts(
        self, nodes: Sequence[int], give_up_at: float
    ) -> tuple[dict[int, Document], dict[int, str]]:
        """Meets nodes; Slurm refuses a step for one that is down, so the others are looked for."""
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
        """What some nodes say of themselves, and why others don't."""
        group = f"{_MEETING}{secrets.token_hex(6)}"
        step = self._new_step(group, nodes)
        try:
            self._launch_what_may_run()
            hellos = step.hellos()
        finally:
            try:
                self.end(nodes, group)
            except RanksLeftError as error:  # it never had a rank
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
        )

    def _new_step(self, group: str, nodes: Sequence[int]) -> Step:
        names = {node: self.settings.node_names[node] for node in nodes}
        step = Step(group=group, nodes=names, connect_within_s=self.settings.connect_within_s)
        with self._lock:
            token = secrets.token_hex(16)
            self._running.by_group[group] = step
            self._running.tokens[group] = token
            self._running.waiting.append(group)
        self.lines.expect(token, step)
        return step

    def _launch_what_may_run(self) -> None:
        """Launches steps that wait, in the order of their coming, as far as the limit lets it."""
        running = self._running
        with self._lock:
            while running.waiting and len(running.launched) < self.settings.max_steps:
                group = running.waiting.popleft()
                running.launched.add(group)
                step = running.by_group[group]
                try:
                    step.launch(self._srun(group, step.nodes))
                except OSError as error:  # of this group, whoever's end it is that let it start
                    step.give_up(f"srun can't be started: {error}")
            if running.waiting:
                most, waiting = self.settings.max_steps, len(running.waiting)
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
                "--no-kill",  # a node that dies shall not take the others' words with it
                "--kill-on-bad-exit=0",
                "--wait=0",
                "--input=none",
                "--quit-on-interrupt",
                *settings.options,
                *python_module("workers.step_node"),
                f"--entry={settings.rank_entry}",
                *(["--look"] if group.startswith(_MEETING) else []),
            ],
            environment={
                **with_our_package(inherited),
                STEP_VARIABLE: _step_name(group),
                ADDRESS_VARIABLE: self.lines.address,
                TOKEN_VARIABLE: self._running.tokens[group],
            },
        )

    def _note_losses(self, step: Step) -> None:
        with self._lock:
            for node, why in step.losses.items():
                self._lost.setdefault(node, why)


def _step_name(group: str) -> str:
    return f"layout-tuner-{group}"

"""One step of an allocation: the nodes of a group, from the first connection to the last exit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Final

from layout_tuner.workers.errors import NodeLostError
from layout_tuner.workers.launchers.agent import log_tails
from layout_tuner.workers.launchers.agent_listener import Receiver
from layout_tuner.workers.launchers.launcher_nodes import CAUSE_WITHIN_S, NodeEvent
from layout_tuner.workers.launchers.slurm_step.srun_process import SrunProcess
from layout_tuner.workers.ranks.json_lines import Document, JsonLines
from layout_tuner.workers.ranks.rank_task import RankTask

_LOOK_EVERY_S: Final = 0.2
"""How often a waiting step checks whether its `srun` still runs."""
_WORDS_WITHIN_S: Final = CAUSE_WITHIN_S / 2
"""How long `srun` may take to print the reason, or to end, after a node's connection closed. A
group whose failure waits for its cause waits longer."""
_ENDED_WITHIN_S: Final = 40.0
"""Longer than the time limit of a node for its zygote."""
_GONE_WITHIN_S: Final = 15.0


@dataclass(kw_only=True, slots=True)
class _Member:
    """A node of the step."""

    name: str
    hello: Document | None = None
    line: JsonLines | None = None
    ordered: bool = False
    later_orders: list[Document] = field(default_factory=list)
    """Orders that came before its ranks were started."""
    started: bool = False
    ended: Document | None = None
    told_loss: str = ""
    """What its agent reported of the loss of its zygote; empty: it is there."""
    told_loss_at: float = 0.0
    lost: bool = False
    disconnected_at: float | None = None
    is_cut_off: bool = False

    @property
    def is_there(self) -> bool:
        return self.line is not None and self.disconnected_at is None

    @property
    def can_end(self) -> bool:
        """Whether it may still report that its ranks have ended."""
        return self.is_there and not self.ended and not self.told_loss and not self.lost

    @property
    def is_gone(self) -> bool:
        """Whether its task has certainly ended: the kernel closed the connection."""
        return self.disconnected_at is not None and not self.is_cut_off


class Step:
    """The nodes of one step and their events. The group's thread polls; another one reads."""

    def __init__(self, *, group: str, nodes: Mapping[int, str], connect_within_s: float) -> None:
        self._group = group
        self._members = {node: _Member(name=name) for node, name in nodes.items()}
        self._connect_within_s = connect_within_s
        self._tasks: Mapping[int, Sequence[RankTask]] = {}
        self._changed = threading.Condition()
        self._events: list[NodeEvent] = []
        self._process: SrunProcess | None = None
        self._launched_at = 0.0
        self._is_over = False
        self.reasons: dict[int, str] = {}
        """Why nodes can't go on, by position."""
        self.losses: dict[int, str] = {}
        """The same, only for nodes that are at fault themselves."""

    @property
    def nodes(self) -> Sequence[int]:
        """Positions of the nodes."""
        return tuple(self._members)

    @property
    def srun_pid(self) -> int | None:
        """The pid of `srun`; None: the step still waits."""
        return None if self._process is None else self._process.pid

    @property
    def pids(self) -> Mapping[int, int]:
        """Pids of the step's tasks, by position of the node."""
        return {node: m.hello["pid"] for node, m in self._members.items() if m.hello}

    def launch(self, process: SrunProcess) -> None:
        """Takes the `srun` that has been started for the step."""
        with self._changed:
            self._process = process
            self._launched_at = time.monotonic()
            self._changed.notify_all()

    def give_up(self, why: str) -> None:
        """Ends the step where its `srun` could not be started."""
        with self._changed:
            self._is_over = True
            for node in self._members:
                self._lose(node, why, to_blame=False)
            self._changed.notify_all()

    def start(self, tasks: Mapping[int, Sequence[RankTask]]) -> None:
        """Starts ranks on each node as soon as it connects."""
        self._tasks = tasks
        self._add_event("starting")

    def hellos(self) -> Mapping[int, Document]:
        """The greetings of the nodes; waits until each has connected or is lost."""
        while not all(m.hello or m.lost for m in self._members.values()):
            self.poll(_LOOK_EVERY_S)
        return {node: m.hello for node, m in self._members.items() if m.hello}

    # The thread that reads the connections calls the next three methods: they must not block.

    def connected(self, hello: Document, line: JsonLines) -> Receiver | None:
        """Notes that a node has connected; None: it is not of this step."""
        with self._changed:
            for node, member in self._members.items():
                if member.name == hello["name"] and member.hello is None and not member.lost:
                    member.hello, member.line = hello, line
                    self._changed.notify_all()
                    return Receiver(
                        take=partial(self._take, member, node),
                        disconnected=partial(self._disconnected, member),
                    )
        return None

    def _take(self, member: _Member, node: int, documents: list[Document]) -> None:
        with self._changed:
            for document in documents:
                match document["event"]:
                    case "alive":
                        continue
                    case "ready":
                        member.started = True
                        if all(m.started for m in self._members.values()):
                            self._add_event("started")
                    case "ended":
                        member.ended = document
                    case "lost" if member.ended:
                        continue  # its zygote ends with the step
                    case "lost":  # perhaps of the end of srun: `_note_losses` tells
                        member.told_loss = f"node {member.name} was lost: {document['message']}"
                        member.told_loss_at = time.monotonic()
                    case _:
                        self._events.append(NodeEvent(node=node, document=document))
            self._changed.notify_all()

    def _disconnected(self, member: _Member, is_cut_off: bool) -> None:
        """Notes that a connection has closed: by the end of its task, or by a cut."""
        with self._changed:
            member.disconnected_at = time.monotonic()
            member.is_cut_off = is_cut_off
            self._changed.notify_all()

    # The thread of the group calls the others.

    def poll(self, timeout_s: float) -> list[NodeEvent]:
        """The events since the last call; waits for one up to the timeout."""
        give_up_at = time.monotonic() + timeout_s
        while True:
            self._send_start_orders()
            with self._changed:
                self._note_losses()
                left_s = give_up_at - time.monotonic()
                if self._events or left_s <= 0:
                    events, self._events = self._events, []
                    return events
                if not self._to_order():
                    self._changed.wait(min(left_s, _LOOK_EVERY_S))

    def tell(self, document: Document) -> None:
        """Sends an order to each node once its ranks have started; NodeLostError if it is lost."""
        for node, member in self._members.items():
            if member.ordered:
                self._send(node, member, document)
            else:  # the first rank may listen before the last node has connected
                member.later_orders.append(document)

    def end(self) -> dict[int, str]:
        """Ends the group, then the step; returns log tails by rank, or raises RanksLeftError."""
        if self._process is None:
            return {}
        ordered = {node: m for node, m in self._members.items() if m.ordered and m.is_there}
        for node in ordered:
            self._try_to_send(node, {"order": "end", "group": self._group})
        self._wait_for(lambda: not any(m.can_end for m in ordered.values()), _ENDED_WITHIN_S)
        self._close_lines()
        self._lose_unended_nodes()
        members = self._members.values()
        self._process.end(
            step_id=next((m.hello["step"] for m in members if m.hello), None),
            is_clean=all(m.is_gone and (m.ended or not m.ordered) for m in members),
            tasks_are_gone=all(m.is_gone for m in members),
        )
        return log_tails({node: m.ended for node, m in self._members.items() if m.ended})

    def _lose_unended_nodes(self) -> None:
        with self._changed:
            for node, member in self._members.items():
                if member.ordered and not member.ended and not self._is_over:
                    why = f"node {member.name} did not report that its ranks have ended"
                    self._lose(node, member.told_loss or why + _quoted(self._last_words()))

    def _close_lines(self) -> None:
        """Closes the connections for writing, and waits until the tasks close their ends."""
        for member in self._members.values():
            if member.line is not None:
                member.line.end_writing()
        self._wait_for(lambda: not any(m.is_there for m in self._members.values()), _GONE_WITHIN_S)

    def _last_words(self) -> str:
        return "" if self._process is None else self._process.last_words()

    def _wait_for(self, condition: Callable[[], bool], within_s: float) -> None:
        with self._changed:
            self._changed.wait_for(condition, within_s)

    def _to_order(self) -> list[tuple[int, _Member]]:
        return [
            (node, m)
            for node, m in self._members.items()
            if node in self._tasks and m.is_there and not m.ordered and not m.lost
        ]

    def _send_start_orders(self) -> None:
        with self._changed:
            to_order = self._to_order()
        for node, member in to_order:
            member.ordered = True
            tasks = [asdict(task) for task in self._tasks[node]]
            self._try_to_send(node, {"order": "start", "tasks": tasks})
            for document in member.later_orders:
                self._try_to_send(node, document)

    def _send(self, node: int, member: _Member, document: Document) -> None:
        try:
            assert member.line is not None
            member.line.send(document)
        except OSError as error:
            raise NodeLostError(f"node {member.name} was lost: {error}", node=node) from error

    def _try_to_send(self, node: int, document: Document) -> None:
        """Sends a document; where that fails, the reading thread notices the closed connection."""
        with suppress(NodeLostError):
            self._send(node, self._members[node], document)

    def _add_event(self, event: str) -> None:
        document = {"event": event, "group": self._group}
        self._events.append(NodeEvent(node=self.nodes[0], document=document))

    def _note_losses(self) -> None:
        """Notes lost nodes; each loss is one event."""
        if self._process is None or self._is_over:
            return
        code = self._process.exit_code()
        if code is not None:
            self._is_over = True
            later, self._events = self._events, []
            self._lose_with_srun(code, self._last_words())
            # Where srun was killed, Slurm kills the ranks of the step: first comes the cause.
            self._events = self._events + later if code < 0 else later + self._events
            return
        now = time.monotonic()
        for node, member in self._members.items():
            if member.hello is None and now > self._launched_at + self._connect_within_s:
                why = f"node {member.name} did not connect within {self._connect_within_s:g} s"
                self._lose(node, why + _quoted(self._last_words()))
            elif member.told_loss and now > member.told_loss_at + _WORDS_WITHIN_S:
                self._lose(node, member.told_loss)
            elif member.disconnected_at is not None and not member.ended:
                words = self._last_words()
                if member.name in words or now > member.disconnected_at + _WORDS_WITHIN_S:
                    why = f"node {member.name} was lost: its line closed"
                    self._lose(node, why + _quoted(words))

    def _lose(self, node: int, why: str, *, to_blame: bool = True) -> None:
        member = self._members[node]
        if member.lost:
            return
        member.lost = True
        self.reasons[node] = why
        if to_blame:
            self.losses[node] = why
        self._events.append(NodeEvent(node=node, document={"event": "lost", "message": why}))

    def _lose_with_srun(self, code: int, words: str) -> None:
        """Notes the loss of all nodes after the end of `srun`.

        At fault are nodes that did not connect where others did, or that `srun` names.
        """
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        why = f"the step's srun ended with {how}{_quoted(words)}"
        silent = [node for node, m in self._members.items() if m.hello is None]
        if len(silent) == len(self._members) > 1:
            blamed = [node for node in silent if self._members[node].name in words]
        else:
            blamed = silent
        for node in blamed:
            self._lose(node, f"node {self._members[node].name} did not connect: {why}")
        for node in self._members:
            self._lose(node, why, to_blame=False)


def _quoted(words: str) -> str:
    return f"; srun's last words: {words}" if words else ""
